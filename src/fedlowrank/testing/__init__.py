"""Checks of methods against their contract."""
