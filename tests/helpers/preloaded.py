"""Imported by the fork server: everything a run imports, and composed settings."""

# ruff: noqa: F401

import lm.training.run
import lm.training.tensorboard
import tests.helpers.training
from tests.conftest import TINY, composed, keep_what_is_imported

composed(*TINY)
keep_what_is_imported()
