"""The files of a report, and what a terminal shows of it."""
