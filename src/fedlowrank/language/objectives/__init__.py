"""What a language model learns besides the next token: preferences."""
