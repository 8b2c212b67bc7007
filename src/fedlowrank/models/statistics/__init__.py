"""Statistics of batch normalization, and buffers of clients."""
