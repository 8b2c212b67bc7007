"""The contract of a federated method, and the values it is written in: trees, keys, losses, optimizers."""
