"""Keep runs without their weights: small enough to commit, complete enough to redraw tables and plots.

Paths are shortened to their last part, numbers to six digits. Host names and times of day are removed.
"""

import gzip
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lm.compare.run_records import Run
from lm.config.validate import read_settings
from lm.system.errors import UserError
from lm.system.files import write_bytes, write_json, write_text
from lm.system.tree import map_leaves
from lm.training.metrics import COMPRESSED, FILE
from lm.training.provenance import FILE as PROVENANCE
from lm.training.provenance import read_starts

_START = r"(?:~|\.\.?)?/"
_PATH = re.compile(rf"(?<![\w:/.])(?:{_START}(?:(?:(?!,{_START})[^\s/'\"])+/)+|\.\.?/)")
"""Matches the folders of a path that starts at the root, at home or with dots; not URLs. A comma before another path
ends it."""


def keep(runs: Sequence[Run], folder: Path) -> None:
    """Copy the settings, metrics, summary and provenance of finished runs to `folder/RUN`."""
    names = [run.path.resolve().name for run in runs]
    for run, name in zip(runs, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"Two of the runs are named {name}. Keep them in different folders, or rename one.")
        if not run.finished:
            raise UserError(f"{run.path} is not finished, so nothing was copied. Finish it with resume={run.path}.")
        if (folder / name).resolve() == run.path.resolve():
            raise UserError(f"--keep must name another folder than that of the runs; got {folder}. Try --keep results.")
        if (folder / name / FILE).exists():
            raise UserError(f"--keep must not overwrite a run, and {folder / name} is one. Try --keep results.")
    for run, name in zip(runs, names, strict=True):
        _copy(run, folder / name)


def _copy(run: Run, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    write_text(target / "config.yaml", yaml.safe_dump(_without_folders(read_settings(run.path)), sort_keys=False))
    write_json(target / "summary.json", _without_folders(run.summary))
    write_json(target / PROVENANCE, {"starts": [_start(start) for start in read_starts(run.path)]})
    records = [{key: value for key, value in record.items() if key != "time"} for record in run.records]
    rounded = map_leaves(lambda leaf: float(f"{leaf:.6g}") if isinstance(leaf, float) else leaf, records)
    lines = "".join(json.dumps(record) + "\n" for record in rounded)
    write_bytes(target / COMPRESSED, gzip.compress(lines.encode(), mtime=0))  # the same bytes each time


def _without_folders(value: Any) -> Any:
    """Shorten every path in the values to its last part."""
    return map_leaves(lambda leaf: _PATH.sub("", leaf) if isinstance(leaf, str) else leaf, value)


def _start(start: dict[str, Any]) -> dict[str, Any]:
    kept = _without_folders({key: value for key, value in start.items() if key not in ("folder", "host", "command")})
    return {**kept, "command": shlex.join(map(_without_folders, shlex.split(start["command"])))}
