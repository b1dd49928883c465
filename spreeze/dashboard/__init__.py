"""The dashboard: reads run directories, starts and stops runs as processes of their own.

It listens on this machine only, refuses foreign Host headers and origins, asks for a token, and resumes no run that
would import code or write out of its directory. Charts are drawn on canvases (drag to zoom, double-click to see all; a
band shows lowest and highest where points were put together). A hidden tab asks for nothing, and pictures of the agent
are rendered only while somebody looks. ``server`` switches off TCP's small-packet delay, which made each answer of a
page wait for the browser's acknowledgement, and loads the pages before anybody visits.
"""
