"""Rules that divide examples among clients and into training, validation and test sets."""
