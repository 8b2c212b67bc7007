"""Differential privacy: noise, budgets, ledgers and accounting."""
