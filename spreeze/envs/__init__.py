"""Environments: made by id, described, stepped one at a time, probed in a child. Only here is Gymnasium known."""
