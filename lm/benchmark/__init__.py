"""Speed measurements: `python -m lm.benchmark what=...`."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `train.py`; must be set before torch is imported
