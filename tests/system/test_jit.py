"""Compiled functions run everywhere, also where their machine code cannot be kept."""

import os
import subprocess
import sys
from pathlib import Path

from lm.system.jit import compiled
from tests.conftest import ROOT


@compiled
def twice(number: int) -> int:
    return 2 * number


def test_jit_preserves_function() -> None:
    assert twice(21) == 42


def test_without_a_folder_for_machine_code_it_is_compiled_anew(tmp_path: Path) -> None:
    source = "from lm.system.jit import compiled\n@compiled\ndef twice(number):\n    return 2 * number\n"
    (tmp_path / "module.py").write_text(source + "assert twice(21) == 42\n")
    # The only place that numba may then look for is a zip file that holds the source.
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator"}
    environment |= {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", "import module, lm.data.encode, lm.data.exchange, lm.output.clusters.search"],
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    assert not (tmp_path / "__pycache__").exists() or not list((tmp_path / "__pycache__").glob("*.nb*"))
