"""Local training: the passes of one client, or of many clients together."""
