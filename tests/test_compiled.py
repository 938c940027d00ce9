"""Compiled functions run everywhere, also where their machine code cannot be kept."""

import os
import subprocess
import sys

from lm.compiled import compiled
from tests.conftest import ROOT


@compiled
def twice(number: int) -> int:
    return 2 * number


def test_a_compiled_function_is_the_same_function() -> None:
    assert twice(21) == 42


def test_without_a_folder_for_machine_code_it_is_compiled_anew() -> None:
    # The only place that numba may then look for is a zip file that holds the source.
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator"}
    code = """
import lm.data.scan, lm.output.exchange, lm.output.search
from tests.test_compiled import twice
assert twice(21) == 42
"""
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)
