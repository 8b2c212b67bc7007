"""Training passes by a trainer of TRL or transformers instead of this package's own gradient steps."""
