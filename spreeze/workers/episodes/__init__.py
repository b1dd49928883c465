"""Episodes of an evaluation: played, kept for the page's player, and drawn again.

``lockstep``
    plays them, several at a time.
"""
