"""What a method is tested and timed by."""
