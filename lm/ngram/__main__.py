"""Count a corpus's n-grams, with Kneser-Ney smoothing or as a sparse non-negative matrix, and save the model as a run.

python -m lm.ngram data=text8 order=5
python -m lm.ngram data=text8 features=skip5
python -m lm.ngram data=text8 out=FILE.arpa.gz
"""

import hydra

from lm.cli import CONF, run, task
from lm.config.schema import NgramConfig


@hydra.main(version_base="1.3", config_path=CONF, config_name="ngram")
@task(NgramConfig)
def main(config: NgramConfig, overrides: list[str]) -> float:
    from lm.ngram.run import run_ngrams

    return run_ngrams(config, overrides=overrides)


def start() -> None:
    run(main, name="ngram", schema=NgramConfig)


if __name__ == "__main__":
    start()
