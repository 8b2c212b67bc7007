"""Matrices as factors: truncation, thresholding, randomized decompositions, stacking.

Nothing here is federated.
"""
