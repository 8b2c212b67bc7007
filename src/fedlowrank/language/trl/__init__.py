"""Passes of clients that a trainer of TRL or transformers takes instead of this package's own steps."""
