"""What a language model learns from other than the next token."""
