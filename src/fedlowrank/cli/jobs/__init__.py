"""Runs in worker processes of their own."""
