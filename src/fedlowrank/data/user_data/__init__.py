"""Data that a user passes from Python."""
