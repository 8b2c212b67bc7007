"""The experiment file, and what is built from it."""
