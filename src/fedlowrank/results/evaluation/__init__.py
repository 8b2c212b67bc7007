"""Evaluation of the clients' models: models, their scores, and a table of the results."""
