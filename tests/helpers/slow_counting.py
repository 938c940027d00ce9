"""`python -m lm.ngram` that leaves a mark when it begins to count, and then takes its time."""

import sys
import time
from pathlib import Path
from typing import Any

from lm.config.command_line import command
from lm.config.commands import NgramConfig
from lm.runs import ngram_run


def count(*_: Any) -> Any:
    folder = next(word.removeprefix("run_dir=") for word in sys.argv if word.startswith("run_dir="))
    (Path(folder) / "counting").touch()
    time.sleep(600)


if __name__ == "__main__":
    ngram_run.count = count
    command(
        lambda config, overrides: ngram_run.run_ngrams(config, overrides=overrides), name="ngram", schema=NgramConfig
    )
