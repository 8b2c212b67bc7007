"""Secure sums over a network: the server learns only the total of what clients send.

Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017, Figure 4,
with signatures (the variant against an active server). All clients are neighbors; n ≤ 20.
"""
