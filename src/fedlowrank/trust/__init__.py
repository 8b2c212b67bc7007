"""What a client gives away and what it can do to others: compression, clipping, privacy, robust rules, attacks, secure sums."""
