"""Write metrics to `metrics.jsonl` and as TensorBoard events.

The JSON lines are the source of truth. On resume they are truncated to the checkpoint's position, and the events
are rewritten from them, so that neither contains a step twice.
"""

import gzip
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm.system.errors import UserError
from lm.system.files import json_ready

FILE = "metrics.jsonl"
COMPRESSED = "metrics.jsonl.gz"
"""Written by `lm.compare --keep`."""


class Metrics:
    """One record per log or evaluation: `step`, `epoch`, `tokens`, clocks, and metrics by TensorBoard tag."""

    def __init__(self, folder: Path, *, position: int = 0, settings: Mapping[str, Any]) -> None:
        """`settings` (by dotted key) are shown in TensorBoard."""
        from lm.training.tensorboard import Events  # imports torch, which readers of metrics do not need

        kept = read_metrics(folder, position=position)
        path = folder / FILE
        self._file = path.open("a+b")
        self._file.truncate(min(position, path.stat().st_size))
        old = list(folder.glob("events.out.tfevents.*"))
        began = kept[0].get("time", time.time()) if kept else time.time()
        self._events = Events(folder, settings=settings, began=began)
        for record in kept:
            self._events.draw(record)
        self.flush()
        for file in old:
            file.unlink()

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; infinities and NaN become null."""
        record = json_ready({"time": time.time(), **record})
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self._events.draw(record)

    def finish(self) -> None:
        """Mark the run as finished."""
        self._events.finish()

    def flush(self) -> int:
        """Flush everything to disk; return the position up to which the JSON lines are safe."""
        self._events.flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._events.close()


def metrics_file(folder: Path) -> Path:
    """Return the path of metrics.jsonl, or of its compressed form in a kept run."""
    compressed = folder / COMPRESSED
    return compressed if compressed.exists() and not (folder / FILE).exists() else folder / FILE


def read_metrics(folder: Path, *, position: int | None = None) -> list[dict[str, Any]]:
    """Read a run's records, finished or not; given a position, only those before it, which a resumed run keeps."""
    path, records = metrics_file(folder), []
    if position is not None and not path.exists():
        return []
    content = gzip.decompress(path.read_bytes()) if path.name == COMPRESSED else path.read_bytes()
    if position is None:  # a run in progress may have written half a line
        position = content.rfind(b"\n") + 1
    try:
        if position < 0:
            raise ValueError
        for line in content[:position].splitlines():
            record = json.loads(line)
            if not isinstance(record, dict) or "step" not in record:
                raise ValueError
            records.append(record)
    except (ValueError, TypeError, RecursionError):
        raise UserError(
            f"{path} is damaged: line {len(records) + 1} is not a record. Restore it, or move it away."
        ) from None
    return records
