"""`run.json`: the command, commit, versions and machine of every start of a run."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lm.system.files import write_json

FILE = "run.json"
PACKAGES = ("adaptive-lm", "torch", "numpy", "numba", "hydra-core", "omegaconf", "sentencepiece")
PROJECT = Path(__file__).resolve().parents[2]


def add_start(folder: Path, *, device: str, threads: int, num_ranks: int = 1) -> None:
    """Append a record of this start; a resumed run has several."""
    started = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_line(),
        "folder": str(Path.cwd()),
        "commit": commit(PROJECT),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "device": device,
        "threads": threads,
        "ranks": num_ranks,
        "host": platform.node(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }
    write_json(folder / FILE, {"starts": [*read_starts(folder), started]})


def command_line() -> str:
    """Return this process's command line, ready to paste."""
    program, *arguments = sys.orig_argv
    return shlex.join([Path(program).name, *arguments])


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Read a run's starts, oldest first; empty if run.json is missing or damaged."""
    try:
        starts = json.loads((folder / FILE).read_bytes())["starts"]
        return [start for start in starts if isinstance(start, dict)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def commit(folder: Path) -> str | None:
    """Return the current commit, with `+` if files are modified; outside a repository, the Docker image's, or None."""
    if not (folder / ".git").exists():
        return os.environ.get("LM_COMMIT") or None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--match=", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return found.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
