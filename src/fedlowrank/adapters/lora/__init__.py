"""LoRA: layers with factors A and B, and the factors of a whole module."""
