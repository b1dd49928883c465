"""What this machine has, and how it is used at the moment."""
