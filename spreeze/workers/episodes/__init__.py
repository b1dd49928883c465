"""Episodes of an evaluation: played, kept for the page's player, and drawn again.

``lockstep`` plays several at a time, ``episode_recorder`` keeps the numbers of three of them, and the values of their
states, ``episode_redraw`` draws their pictures on demand.
"""
