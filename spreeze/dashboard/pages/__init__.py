"""One file a page; each has a function ``page``."""
