"""The figures of runs without their weights: small enough to commit, enough to redraw every table and plot.

Places on a disk and the machine's name are left out; the command, the commit and the versions stay.
"""

import gzip
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lm.runs.provenance import FILE as PROVENANCE
from lm.runs.provenance import read_starts
from lm.runs.reading import Run, read_config
from lm.system.errors import UserError
from lm.system.files import write_json, write_text, write_whole
from lm.training.metrics import COMPRESSED, read_metrics

PLACES = ("data.root", "data.archive", "run_dir", "resume", "init", "output.cost_model", "hydra.sweep.dir")
"""Settings that say where something is kept."""


def keep(runs: Sequence[Run], folder: Path) -> None:
    """Copy settings, records, summary and provenance of finished runs into `folder`, each under its run's name."""
    names = [run.path.resolve().name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"Two of the runs are named {name}. Keep them in different folders, or rename one.")
    for run, name in zip(runs, names, strict=True):
        if not run.finished:
            raise UserError(f"{run.path} is not finished, so it is not kept. Finish it with resume={run.path}")
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        write_text(target / "config.yaml", yaml.safe_dump(_without_places(read_config(run.path)), sort_keys=False))
        write_json(target / "summary.json", run.summary)
        write_json(target / PROVENANCE, {"starts": [_start(start) for start in read_starts(run.path)]})
        lines = "".join(json.dumps(_record(record)) + "\n" for record in read_metrics(run.path))
        compressed = gzip.compress(lines.encode(), mtime=0)  # the same bytes each time
        write_whole(target / COMPRESSED, lambda file, content=compressed: file.write(content))  # type: ignore[misc]


def _without_places(settings: Any, prefix: str = "") -> Any:
    if not isinstance(settings, dict):
        return settings
    return {
        key: None if f"{prefix}{key}" in PLACES else _without_places(value, f"{prefix}{key}.")
        for key, value in settings.items()
    }


def _start(start: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in start.items() if key not in ("folder", "host")}
    try:
        words = shlex.split(str(start.get("command", "")))
    except ValueError:  # an unbalanced quotation mark: somebody has edited the file
        words = []
    kept["command"] = shlex.join(word for word in words if word.lstrip("+").partition("=")[0] not in PLACES)
    return kept


def _record(record: dict[str, Any]) -> dict[str, Any]:
    """Six digits of each figure, without the time of day."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in record.items()
        if key != "time"
    }
