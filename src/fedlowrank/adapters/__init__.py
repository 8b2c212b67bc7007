"""Low-rank parts of modules: LoRA, mixtures of adaptors, their wire format and their deployment."""
