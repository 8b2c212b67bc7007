"""One client's local pass: trainer, steps, shortcuts of optimizers, several clients at once."""
