"""What a finished run gives: its result, predictions, exported models and representations."""
