"""Speed measurements, each a script: `python -m benchmarks.step --help`.

layers    training step of every output layer, core or input, compared with torch's modules
step      the whole training step, compared with a plain PyTorch step
clusters  automatic cutoffs compared with fixed ones, and the paper's Figures 1 to 3
growth    time and memory of output layers against the vocabulary
gpu       one report on a GPU: its tests, layers, steps and clusters
"""

import os

from lm.system.interrupt import ctrl_c_ends

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `train.py`; must be set before torch is imported
with ctrl_c_ends():  # these imports take seconds
    import benchmarks.workloads  # noqa: F401
