"""What a method is tested by."""
