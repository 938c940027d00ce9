"""Speed claims: `python -m lm.benchmark what=...`, ratios of interleaved medians of process time."""

import os

# As `train.py` has it; it must be said before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
