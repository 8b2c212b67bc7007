"""Matrices as factors: truncation, thresholding, randomized decompositions, sums of low-rank matrices.

This package does not depend on federated learning.
"""
