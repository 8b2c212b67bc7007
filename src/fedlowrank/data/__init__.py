"""Data sets, their partition among clients, and federations."""
