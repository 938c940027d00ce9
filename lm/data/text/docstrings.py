"""Docstrings of Python files, which are parsed and never imported, by several processes at once."""

import ast
import gc
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from lm.system.console import Progress

FILES_AT_ONCE = 50
"""Files that a process is given at a time."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_docstrings(files: Sequence[Path]) -> Iterator[str]:
    """The docstrings of all files, in their order."""
    batches = [files[start : start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE)]
    # Spawned, because a copy of a process that has threads, as torch's, may hang.
    with (
        ProcessPoolExecutor(
            min(os.cpu_count() or 1, 8),
            multiprocessing.get_context("spawn"),
            initializer=gc.disable,  # syntax trees have no cycles, and looking for some takes a fifth of the time
        ) as pool,
        Progress(len(files), label="reading docstrings", unit="files") as bar,
    ):
        for batch, found in zip(batches, pool.map(docstrings_of, batches), strict=True):
            bar.advance(len(batch))
            yield from found


def docstrings_of(files: Sequence[Path]) -> list[str]:
    """Of modules, classes and functions, also nested ones; an unreadable file, or one that is not Python, has none."""
    found = []
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about how others write Python
                tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last: too deeply nested
            continue
        documented = (node for node in _statements(tree) if isinstance(node, DOCUMENTED))
        texts = (ast.get_docstring(node) for node in documented)
        found += [text.encode(errors="replace").decode() for text in texts if text]  # escapes can spell half characters
    return found


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and all statements in it, outer ones and earlier ones first; no expressions, which are the most."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        blocks = [getattr(node, name, ()) for name in ("body", "handlers", "cases", "orelse", "finalbody")]
        inner = [statement for block in blocks if isinstance(block, list) for statement in block]
        pending += reversed(inner)
