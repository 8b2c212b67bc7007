"""Data sets with their file formats."""
