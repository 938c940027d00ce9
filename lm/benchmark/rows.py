"""What benchmarks measure, as records for programs."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm.system.files import write_text

Row = dict[str, Any]
"""`name`, `value`, `unit`, and `ratio`, whose meaning each benchmark says."""


def write_rows(rows: Iterable[Row], out: str) -> None:
    write_text(Path(out), json.dumps(list(rows), indent=1) + "\n")
