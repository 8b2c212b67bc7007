"""Loggers, progress bars and the console of a run."""
