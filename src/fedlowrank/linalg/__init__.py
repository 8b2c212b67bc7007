"""Matrices as factors: truncation, thresholding, randomized decompositions, sums of low-rank matrices.

Nothing here is federated.
"""
