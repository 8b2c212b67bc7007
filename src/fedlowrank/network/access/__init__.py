"""Access control of the server's process: identity, connections, calls and replies.

:mod:`..deploy.guard` runs it within Flower's SuperLink.
"""
