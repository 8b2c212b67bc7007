"""Exports of a run for other programs: settings, model cards, and uploads to the Hugging Face Hub."""
