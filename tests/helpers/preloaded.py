"""Imported by the process that others are forked from: what a run imports, and Hydra with its caches filled."""

# ruff: noqa: F401

import lm.training.run
import lm.training.tensorboard
import tests.helpers.training
from tests.conftest import TINY, composed, keep_what_is_imported

composed(*TINY)
keep_what_is_imported()
