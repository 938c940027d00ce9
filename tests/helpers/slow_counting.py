"""`python -m lm.ngram`, writing a marker file when counting starts and then slowed down."""

import sys
import time
from pathlib import Path
from typing import Any

import hydra

from lm.cli import CONF, run, task
from lm.config.schema import NgramConfig
from lm.ngram import run as ngram_run


def count(*_: Any) -> Any:
    folder = next(word.removeprefix("run_dir=") for word in sys.argv if word.startswith("run_dir="))
    (Path(folder) / "counting").touch()
    time.sleep(600)


@hydra.main(version_base="1.3", config_path=CONF, config_name="ngram")
@task(NgramConfig)
def main(config: NgramConfig, overrides: list[str]) -> float:
    return ngram_run.run_ngrams(config, overrides=overrides)


if __name__ == "__main__":
    ngram_run.count = count
    run(main, name="ngram", schema=NgramConfig)
