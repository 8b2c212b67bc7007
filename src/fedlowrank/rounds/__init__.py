"""The course of a run: its rounds, from the settings to the result."""
