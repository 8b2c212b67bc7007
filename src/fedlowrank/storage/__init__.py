"""What is kept of a run: states of server and clients, and the files of its folder."""
