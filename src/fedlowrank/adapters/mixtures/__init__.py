"""Mixtures of low-rank adaptors, of which each client uses its own combination (FLoRAL)."""
