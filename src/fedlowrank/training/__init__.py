"""Local training: the passes of one client, and of many clients at once."""
