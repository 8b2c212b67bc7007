"""What is done to data, models and methods before the first round."""
