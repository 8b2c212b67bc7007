"""What several methods share: clusters, LoRA tuning, effective updates."""
