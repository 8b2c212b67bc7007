"""Rows of text data as people have them: their forms, and the source that reads them."""
