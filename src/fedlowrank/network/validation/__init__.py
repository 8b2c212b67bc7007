"""Checks of clients' uploads: form, size, norm."""
