"""What a server and a client keep on disk during a run over a network."""
