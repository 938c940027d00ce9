"""Prepare a corpus, with a download if needed, and print a summary.

python -m lm.prepare data=wikitext2
python -m lm.prepare data=europarl data.language=bg
python -m lm.prepare data=text data.dir=PATH
"""

from lm.cli import command
from lm.config.schema import PrepareConfig


@command("prepare", PrepareConfig)
def start(config: PrepareConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.data.corpus import find_source, open_corpus, summary
    from lm.system.console import say

    is_prepared = find_source(config.data)[1].exists()
    corpus = open_corpus(config.data)
    if is_prepared:
        say(f"{str(corpus.path)!r} is prepared already\n\n{summary(corpus.meta, vocabulary=corpus.vocabulary)}")
    else:  # the summary has been printed
        say(f"{str(corpus.path)!r} is prepared")


if __name__ == "__main__":
    start()
