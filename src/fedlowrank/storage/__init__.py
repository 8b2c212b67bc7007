"""Files of a run: the states of its server and clients, records and other files of its folder."""
