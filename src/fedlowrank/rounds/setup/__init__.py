"""Preparation of data, models and methods before the first round."""
