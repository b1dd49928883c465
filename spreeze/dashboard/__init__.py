"""The dashboard: reads run directories, and starts and stops runs as independent processes.

It listens on localhost only, rejects other Host headers and origins, needs a token, and does not resume a run that
would import code or write outside of its directory. Charts are drawn on canvases (drag to zoom, double-click to see
all; a band shows minimum and maximum where points were merged). A hidden tab makes no requests, and the agent is
rendered only while a page shows it. ``server`` disables Nagle's algorithm, which delayed each answer until the
browser's acknowledgement, and loads the pages before the first visit.
"""
