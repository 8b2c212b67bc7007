"""The experiment file, and the objects that are built from it."""
