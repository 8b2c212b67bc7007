"""Participation in rounds: which clients take part, on what devices and over what connections."""
