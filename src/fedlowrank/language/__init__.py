"""Language models of Hugging Face: the frozen base, its LoRA adapters, and their files."""
