"""Results of a run: one table of numbers, how they are measured, and how they are read again."""
