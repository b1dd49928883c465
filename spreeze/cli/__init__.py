"""The verbs of the command line (``spreeze <verb>``)."""
