"""Checks of arguments and settings, and code named by the user."""
