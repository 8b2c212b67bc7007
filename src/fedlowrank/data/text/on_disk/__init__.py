"""Texts larger than memory: rows that are read when they are needed, and tokens in memory-mapped files."""
