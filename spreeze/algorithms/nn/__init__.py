"""Networks and optimisers that the algorithms share."""
