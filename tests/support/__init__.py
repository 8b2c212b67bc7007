"""Helpers that the tests of several folders use, named after what they make."""
