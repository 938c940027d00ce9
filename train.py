"""Train a language model.

python train.py                                   the embedded corpus, a minute on two cores
python train.py data=text data.dir=PATH           your own text
python train.py resume=auto                       continue where a run was stopped
python train.py --help                            groups, options, settings
"""

from lm.cli import command
from lm.config import Config


def main(config: Config, overrides: list[str]) -> None:
    from lm.run import train  # torch is imported here, so that --help and mistakes answer at once

    train(config, overrides=overrides)


if __name__ == "__main__":
    command(main, name="train", schema=Config)
