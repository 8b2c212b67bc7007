"""The contract of a federated method: hooks, views, messages and updates."""
