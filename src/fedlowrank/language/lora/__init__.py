"""LoRA adapters of language models as PEFT has them."""
