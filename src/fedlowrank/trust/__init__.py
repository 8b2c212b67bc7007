"""What a client reveals and what it can do to others: compression, privacy, robust rules, attacks."""
