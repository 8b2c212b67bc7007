"""How examples are divided among clients and into training, validation and test sets."""
