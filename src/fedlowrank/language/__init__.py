"""Language models of Hugging Face: the frozen base, its LoRA adapters, and the files they are kept in."""
