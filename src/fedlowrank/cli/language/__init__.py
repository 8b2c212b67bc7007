"""Commands of language models: adapter folders, conversations, and base models."""
