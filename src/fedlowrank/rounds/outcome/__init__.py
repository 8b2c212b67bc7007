"""Outcome of a finished run: its result, predictions, exported models and representations."""
