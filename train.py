"""Train a language model.

python train.py                                   the embedded corpus, a minute on two cores
python train.py data=text data.dir=PATH           your own text
python train.py resume=auto                       continue where a run was stopped
python train.py -m output=full,adaptive           several runs, and their comparison
python train.py --help                            groups, options, settings
"""

from pathlib import Path

from lm.cli import command
from lm.config import Config


def main(config: Config, overrides: list[str]) -> None:
    from lm.run import train  # torch is imported here, so that --help and mistakes answer at once

    train(config, overrides=overrides)


def sweep(overrides: list[str], folder: Path) -> int:
    from lm.sweep import sweep as run_all

    return run_all(overrides, folder)


if __name__ == "__main__":
    command(main, name="train", schema=Config, sweep=sweep)
