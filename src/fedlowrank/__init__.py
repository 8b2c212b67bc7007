"""fedlowrank."""
