"""Algorithms: losses, networks and updates. They know no process, no transport and no clock but their own."""
