"""Trust between clients and server: compression, privacy, robust rules and attacks."""
