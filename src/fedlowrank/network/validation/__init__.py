"""Checks of what clients send: form, size, norm."""
