"""Train a language model.

python train.py                                   the built-in corpus, a minute on two cores
python train.py data=text data.dir=PATH           your own text
python train.py resume=auto                       continue where a run was stopped
python train.py -m output=full,adaptive           several runs, and their comparison
python train.py --help                            groups, options, settings
"""

from lm.config.command_line import CommandLine, command
from lm.config.commands import TrainConfig


def main(config: TrainConfig, overrides: list[str]) -> float | None:
    from lm.runs.run import train  # torch is imported here, so that --help and mistakes answer at once

    return train(config, overrides=overrides)


def sweep(line: CommandLine[TrainConfig]) -> int:
    from lm.compare import compare
    from lm.runs.sweep import sweep as run_all

    return run_all(line, compare=lambda paths: compare(paths, out=None))


if __name__ == "__main__":
    command(main, name="train", schema=TrainConfig, sweep=sweep)
