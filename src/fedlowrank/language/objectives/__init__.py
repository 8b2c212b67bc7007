"""What a language model learns from pairs of texts: preferences of responses, and embeddings."""
