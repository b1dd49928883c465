"""The dashboard: shows run directories, and starts and stops runs as independent processes.

It listens on localhost only, checks Host and Origin headers, requires a token, and does not resume runs that would
import code or write outside their directory. Charts are canvases (drag to zoom, double-click to reset; a band shows
minimum and maximum of merged points). Hidden tabs send no requests, and the agent is rendered only while a page shows
it. ``server`` disables Nagle's algorithm, which would delay responses, and preloads the pages.
"""
