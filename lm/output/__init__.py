"""Output layers: one file each, one contract for all (`base.py`)."""
