"""Compiled functions work even if their machine code cannot be cached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_function_is_compiled_without_a_cache_folder(tmp_path: Path) -> None:
    source = "from lm.system.jit import compiled\n@compiled\ndef twice(number):\n    return 2 * number\n"
    (tmp_path / "module.py").write_text(source + "assert twice(21) == 42\n")
    # With this locator, numba caches only functions of zip files.
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator", "PYTHONPATH": str(ROOT)}
    imports = "import module, lm.data.encode, lm.data.brown, lm.output.clusters.choice"
    subprocess.run([sys.executable, "-c", imports], env=environment, cwd=tmp_path, check=True)
    assert not list(tmp_path.rglob("*.nb*"))
