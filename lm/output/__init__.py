"""Output layers: one file per layer in `layers/`, a shared interface (`base.py`) and fused loss (`fused.py`)."""
