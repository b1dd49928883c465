"""Numbers of a run: what each means, where it is stored, and what can be concluded from them."""
