"""Files and bytes."""
