"""Settings: their schema, the layers they come from, and what fits what."""
