"""Files that a server and a client store during a run over a network."""
