"""The docstrings of the Python standard library and of the packages that training installs: no network.

Millions of words by thousands of authors, with a vocabulary of tens of thousands: the built-in corpus on which output
layers differ. A sentence is a paragraph.
"""

import ast
import gc
import hashlib
import multiprocessing
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from lm.config.groups import Count, plugin
from lm.data.source import Source
from lm.data.text.paragraphs import ParagraphConfig, paragraph_source
from lm.system.console import Progress

PACKAGES = """
    absl-py fonttools fsspec grpcio Jinja2 matplotlib mpmath networkx numba numpy packaging pillow protobuf pyparsing
    setuptools sympy tensorboard torch Werkzeug
""".split()  # noqa: SIM905
"""Packages that training installs, with at least twenty thousand words of docstrings."""
FILES_PER_TASK = 50
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOT_READ = {"test", "tests", "testing"}
"""Test folders, whose docstrings explain little."""
NOT_EVERYWHERE = {"site-packages", "dist-packages", "distutils", "ensurepip", "idlelib", "lib2to3", "tkinter"}
NOT_EVERYWHERE |= {"turtledemo"}
"""Folders beside the standard library: installed packages, and parts that some systems package separately."""


@dataclass
class DocstringsConfig(ParagraphConfig):
    """The docstrings of the Python standard library and of the packages that training installs: no network."""

    name: str = "docstrings"
    min_count: Count = 3


@plugin("data", "docstrings", DocstringsConfig)
def source(config: DocstringsConfig) -> Source:
    versions, absent = installed(PACKAGES)
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    python = platform.python_version()
    rule = f"{names} without {' '.join(sorted(NOT_READ | NOT_EVERYWHERE))}"
    missing = f" (not installed: {', '.join(absent)})" if absent else ""
    return paragraph_source(
        config,
        lambda: read_docstrings(standard_library() + [file for name in versions for file in files_of(name)]),
        valid_from=0.9,
        test_from=0.95,
        folder=f"docstrings-{python}-{hashlib.sha256(rule.encode()).hexdigest()[:8]}",
        source=f"the docstrings of Python {python}, {names}{missing}",
        meta={"packages": versions, "absent_packages": absent},
    )


def installed(names: list[str]) -> tuple[dict[str, str], list[str]]:
    """Versions of the installed packages, and the names of the others."""
    versions, absent = {}, []
    for name in names:
        try:
            versions[name] = distribution(name).version.partition("+")[0]  # +cpu or +cu130: the same text
        except PackageNotFoundError:
            absent.append(name)
    return versions, absent


def standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = NOT_READ | NOT_EVERYWHERE
    return sorted(file for file in root.rglob("*.py") if not left_out & set(file.relative_to(root).parts))


def files_of(name: str) -> list[Path]:
    """Return the Python files of an installed package without its tests."""
    package = distribution(name)
    listed = [file for file in package.files or [] if file.suffix == ".py" and not NOT_READ & set(file.parts)]
    return sorted(path for file in listed if (path := Path(str(package.locate_file(file)))).is_file())


def read_docstrings(files: Sequence[Path]) -> Iterator[str]:
    """Yield the docstrings of all files, in their order; files are parsed by several processes and never imported."""
    batches = [files[start : start + FILES_PER_TASK] for start in range(0, len(files), FILES_PER_TASK)]
    # Forking a process that has threads, as torch does, may hang.
    with (
        ProcessPoolExecutor(
            min(os.cpu_count() or 1, 8),
            multiprocessing.get_context("spawn"),
            initializer=gc.disable,  # syntax trees have no cycles; looking for them costs a fifth of the time
        ) as pool,
        Progress(len(files), label="reading docstrings", unit="files") as progress,
    ):
        for batch, docstrings in zip(batches, pool.map(docstrings_of, batches), strict=True):
            progress.advance(len(batch))
            yield from docstrings


def docstrings_of(files: Sequence[Path]) -> list[str]:
    """Yield docstrings of modules, classes and functions, including nested ones; none for invalid Python."""
    docstrings: list[str] = []
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the source
                tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: too deeply nested
            continue
        documented = (node for node in _statements(tree) if isinstance(node, DOCUMENTED))
        texts = (ast.get_docstring(node) for node in documented)
        # Lone surrogates and zero bytes are not text.
        docstrings += [text.encode(errors="replace").decode().replace("\0", "\ufffd") for text in texts if text]
    return docstrings


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the module and all its statements, outer and earlier ones first; skipping expressions makes this fast."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        blocks = [getattr(node, name, ()) for name in ("body", "handlers", "cases", "orelse", "finalbody")]
        inner = [statement for block in blocks if isinstance(block, list) for statement in block]
        pending += reversed(inner)
