"""Count the n-grams of a corpus: interpolated Kneser-Ney, as a run like any other.

python -m lm.ngram data=text8 order=5
python -m lm.ngram data=text8 out=FILE.arpa.gz
"""

from lm.config.command_line import command
from lm.config.commands import NgramConfig


def main(config: NgramConfig, overrides: list[str]) -> float:
    from lm.runs.ngram_run import run_ngrams  # torch is imported here, so that --help and mistakes answer at once

    return run_ngrams(config, overrides=overrides)


if __name__ == "__main__":
    command(main, name="ngram", schema=NgramConfig)
