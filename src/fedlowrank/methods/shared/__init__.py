"""Functions that several methods share: clusters, LoRA training, effective updates."""
