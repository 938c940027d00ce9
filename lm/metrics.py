"""What a run measures, written twice: `metrics.jsonl` to compute with, TensorBoard events to look at.

The JSON lines are the truth. When a run is resumed they are cut back to what its checkpoint knew of, and the events
are written anew from them, so that neither ever holds a step twice. The new events open with a mark that makes a
TensorBoard that is already showing the run forget the old ones.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from lm.errors import UserError
from lm.files import json_ready

TIME_TAGS = ("time", "train_seconds", "eval_seconds", "speed/", "memory/")
"""Keys (or their beginnings) that measure the machine; all others are the same in every repetition of a run."""


class Metrics:
    """One line per log or evaluation: `step`, `epoch`, `tokens`, clocks, and figures under their TensorBoard tags."""

    def __init__(self, folder: Path, *, position: int = 0, texts: dict[str, str]) -> None:
        # Torch comes with it, and those who only read metrics do without.
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        self._file = path.open("a+b")
        self._file.truncate(min(position, path.stat().st_size))
        self._file.seek(0)
        try:
            kept = [_record(line) for line in self._file]
        except ValueError:
            raise UserError(
                f"{path} holds lines that are not records, so the run's curves cannot be continued. "
                "Restore it, or move it away to start the curves afresh."
            ) from None
        old = list(folder.glob("events.out.tfevents.*"))
        self._last_second = -1
        self._writer = SummaryWriter(str(folder), purge_step=0)
        for tag, text in texts.items():
            self._writer.add_text(tag, text, 0)
        for record in kept:
            self._draw(record)
        self.flush()
        for file in old:
            file.unlink()

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; infinite and undefined figures become null, which JSON can hold."""
        record = json_ready({"time": time.time(), **record})
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self._draw(record)

    def flush(self) -> int:
        """Bring everything to disk; the position up to which the JSON lines are then safe."""
        self._writer.flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._writer.close()

    def _draw(self, record: dict[str, Any]) -> None:
        for tag, value in record.items():
            if "/" in tag and value is not None:
                self._writer.add_scalar(tag, value, record["step"], walltime=record["time"])
        if record.get("valid/ppl") is not None:
            # A step of this chart is a second; evaluations that fall into the same one are set a second apart.
            self._last_second = max(self._last_second + 1, round(record["train_seconds"]))
            self._writer.add_scalar(
                "valid/ppl_by_training_second",
                record["valid/ppl"],
                self._last_second,
                walltime=record["time"],
            )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, finished or not."""
    path = folder / "metrics.jsonl"
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # a run that is writing may have its last line half done
                break
            try:
                records.append(_record(line))
            except ValueError:
                raise UserError(
                    f"{path} is damaged: line {number} is not a record. Restore the file, or leave the run out."
                ) from None
    return records


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError from None
    if not isinstance(record, dict) or "step" not in record:
        raise ValueError
    return record


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """What of a record must be the same when the run is repeated."""
    return {key: value for key, value in record.items() if not key.startswith(TIME_TAGS)}
