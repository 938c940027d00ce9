"""Train a word-level language model.

python train.py                                   the built-in corpus, a minute on two cores
python train.py data=text data.dir=PATH           your own train.txt, valid.txt, test.txt
python train.py experiment=text8 output=full      a preset of the paper
python train.py -m output=full,adaptive           several runs, one after the other, and their comparison
python train.py resume=auto                       continue the newest unfinished run of these settings
python train.py --config-dir DIR experiment=mine  your own DIR/experiment/mine.yaml
python train.py --help                            groups, options, settings
"""

import gc
import os
from pathlib import Path

from lm.cli import command
from lm.config.schema import TrainConfig
from lm.training.sweep import finished_perplexity, register_launcher

register_launcher()


def compare_sweep(folder: Path) -> None:
    from lm.compare import compare_sweep

    compare_sweep(folder)


@command("train", TrainConfig, after_sweep=compare_sweep)
def start(config: TrainConfig, overrides: list[str]) -> float | None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    gc.disable()  # imports allocate objects that stay: collecting them takes a tenth of the start
    from lm.training.run import train

    gc.enable()
    if HydraConfig.get().mode is RunMode.MULTIRUN and config.run_dir is not None:  # a sweep by another launcher
        perplexity = finished_perplexity(Path(config.run_dir), config)
        if perplexity is not None:
            return perplexity
        join_tasks()
    return train(config, overrides)


def join_tasks() -> None:
    """Make several tasks of a submitit job the ranks of one run."""
    if "SUBMITIT_EXECUTOR" in os.environ:
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        if JobEnvironment().num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)


if __name__ == "__main__":
    start()
