"""What several methods share: clusters, LoRA training, effective updates."""
