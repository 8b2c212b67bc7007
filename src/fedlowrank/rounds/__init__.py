"""What happens in a run: rounds, from the settings to the result."""
