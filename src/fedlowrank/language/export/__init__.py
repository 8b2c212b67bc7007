"""Exports of a run for other programs: settings, adapter folders, model cards, and uploads to the Hugging Face Hub."""
