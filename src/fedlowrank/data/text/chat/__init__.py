"""Conversations: their turns as data sets hold them, and as a chat template writes them."""
