"""Secure sums over a network: the server learns the total of what clients send, and nothing else.

Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017, Figure 4,
with signatures (the variant against an active server). All clients are neighbors; n ≤ 20.
"""
