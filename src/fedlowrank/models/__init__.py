"""Models, and the split of any model into representation and head."""
