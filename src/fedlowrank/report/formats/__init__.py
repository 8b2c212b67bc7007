"""File formats of a report, and its view in a terminal."""
