"""Output layers: a file each in `layers/`, one contract for all (`base.py`), one fused loss (`fused.py`)."""
