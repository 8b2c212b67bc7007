"""What leaves a run for other programs: settings of an export, model cards, and uploads to the Hugging Face Hub."""
