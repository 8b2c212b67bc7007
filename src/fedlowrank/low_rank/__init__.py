"""Low-rank parts: factored matrices and adapters."""
