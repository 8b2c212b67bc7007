"""LoRA adapters of language models, attached by PEFT."""
