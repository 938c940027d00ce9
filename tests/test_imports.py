"""Import order of `lm/`: a folder imports only from itself and from folders above it in this list."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = "system config data optim output model training ngram inference export compare".split()  # noqa: SIM905
FILES = sorted((ROOT / "lm").rglob("*.py"))


def imports(source: str) -> list[str]:
    """Find the modules of `lm` that a file imports, at any level."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            # `from lm import training` names a room too.
            found += [f"lm.{alias.name}" for alias in node.names] if node.module == "lm" else [node.module]
    return [name for name in found if name.split(".")[0] == "lm"]


def wrong_imports(path: Path, source: str) -> list[str]:
    """Find imports from folders below the file's own; files in `lm/` itself and commands come last."""
    place = path.relative_to(ROOT / "lm").parts
    if len(place) == 1 or place[-1] == "__main__.py":
        return []
    allowed = ROOMS[: ROOMS.index(place[0]) + 1]
    return [name for name in imports(source) if name.split(".")[1:2] and name.split(".")[1] not in allowed]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_upwards(path: Path) -> None:
    assert wrong_imports(path, path.read_text()) == []


def test_inverted_import_is_detected() -> None:
    batches = ROOT / "lm/data/batches.py"
    for line in (
        "from lm.output.base import OutputLayer",
        "import lm.training.run",
        "def f():\n    from lm import training",
    ):
        assert wrong_imports(batches, f"{batches.read_text()}\n{line}\n"), line


def test_lm_root_holds_only_thin_commands() -> None:
    assert len(list((ROOT / "lm").glob("*.py"))) <= 8


ALLOWED = {
    "torch.utils._python_dispatch": "lm/system/memory.py",
    "torch._subclasses.fake_tensor": "lm/system/memory.py",
}
"""Private modules that one file each may import."""


def private_names(source: str) -> list[str]:
    """Find private modules and names of other packages that a file imports."""
    tree, names = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module if node.module in ALLOWED else f"{node.module}.{alias.name}" for alias in node.names]
    own = ("lm.", "tests.", "benchmarks.", "__future__")
    return [name for name in names if not name.startswith(own) and any(p.startswith("_") for p in name.split("."))]


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: path.name)
def test_no_private_name_of_another_package_is_imported(path: Path) -> None:
    names = private_names(path.read_text())
    if path.is_relative_to(ROOT / "tests"):
        assert set(names) <= set(ALLOWED)
    else:
        assert [name for name in names if ALLOWED.get(name) != str(path.relative_to(ROOT))] == []
