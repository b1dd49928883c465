"""Episodes of an evaluation: played, kept for the page's player, and drawn again.

``lockstep``
    plays them, several at a time.
``episode_recorder``
    keeps the numbers of three of them.
``episode_redraw``
    makes their pictures, when somebody looks.
``value_snapshot``, ``step_values``
    values of their states: what a learner publishes, and how the recorder reads it.
"""
