"""Imported by the process that others are forked from: what a run imports, and Hydra with its caches filled."""

# ruff: noqa: F401
import torch._dynamo

import lm.run
import lm.tensorboard
import tests.training
from tests.conftest import TINY, composed

composed(*TINY)
