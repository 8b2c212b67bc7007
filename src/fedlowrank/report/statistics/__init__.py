"""Statistics of runs and of groups of runs."""
