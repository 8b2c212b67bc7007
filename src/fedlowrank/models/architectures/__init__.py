"""The models of the papers."""
