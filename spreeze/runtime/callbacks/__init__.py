"""Code of the user that hears of a run and steers it.

``callback``
    the base class, as users import it from ``spreeze``.
``links``
    the supervisor's side: one process for each callback, told over a socket; what these have changed.
``process``
    the body of that process.
"""
