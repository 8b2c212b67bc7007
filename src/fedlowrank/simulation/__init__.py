"""Rounds of a federation on this machine: the loop, states, checkpoints, evaluation, records."""
