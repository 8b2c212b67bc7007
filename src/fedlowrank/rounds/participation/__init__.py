"""Who takes part in a round, on what devices and over what connections."""
