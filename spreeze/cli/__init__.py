"""The commands of the command line (``spreeze <command>``)."""
