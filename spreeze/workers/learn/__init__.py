"""From collected data to gradient steps, on whichever device."""
