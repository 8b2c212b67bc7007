"""Text: records from files and the hub, formats of instructions, and their tokens as examples."""
