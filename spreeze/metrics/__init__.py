"""The metrics of a run: their meaning, their storage, and conclusions from them."""
