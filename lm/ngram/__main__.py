"""Count a corpus's n-grams, with Kneser-Ney smoothing or as a sparse non-negative matrix, and save the model as a run.

python -m lm.ngram data=text8 order=5
python -m lm.ngram data=text8 features=skip5
python -m lm.ngram data=text8 out=FILE.arpa.gz
"""

from lm.cli import command
from lm.config.schema import NgramConfig


@command("ngram", NgramConfig)
def start(config: NgramConfig, overrides: list[str]) -> float:
    from lm.ngram.run import run_ngrams

    return run_ngrams(config, overrides=overrides)


if __name__ == "__main__":
    start()
