"""Processes, keys and access control of a deployment."""
