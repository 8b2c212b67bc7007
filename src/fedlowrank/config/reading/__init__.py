"""Converts the text of an experiment file to checked dataclasses."""
