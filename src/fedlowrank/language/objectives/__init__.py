"""Objectives of language models on pairs of texts: preferences of responses, and embeddings."""
