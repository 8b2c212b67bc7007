"""Sections of an experiment file."""
