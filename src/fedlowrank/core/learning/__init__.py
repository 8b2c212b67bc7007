"""Losses and optimizers."""
