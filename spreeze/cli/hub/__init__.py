"""Policies on a model hub: what is sent and taken (``repository``), the page that describes it, and the two verbs."""
