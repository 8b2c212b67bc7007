"""Tensors with one slice a client, and the rules by which operations apply to each slice."""
