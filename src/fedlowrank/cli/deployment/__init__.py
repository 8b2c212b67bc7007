"""Commands for servers and sites of a network."""
