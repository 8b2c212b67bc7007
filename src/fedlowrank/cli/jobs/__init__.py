"""Runs in separate worker processes."""
