"""How the models of clients are evaluated: models, their scores, and the results of these as a table."""
