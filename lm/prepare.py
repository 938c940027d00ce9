"""Prepare a corpus, downloading it if needed, and print what was done.

python -m lm.prepare data=text8
python -m lm.prepare data=europarl data.language=bg
python -m lm.prepare data=text data.dir=PATH
"""

from lm.config.command_line import command
from lm.config.commands import PrepareConfig


def main(config: PrepareConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.data.corpus import summary
    from lm.data.opening import open_corpus
    from lm.system.console import say

    prepared_now = False

    def notice(text: str) -> None:
        nonlocal prepared_now
        prepared_now = True
        say(text)

    corpus = open_corpus(config.data, notice=notice)
    if prepared_now:  # its summary was printed on the way
        say(f"{str(corpus.path)!r} is prepared")
    else:
        say(f"{str(corpus.path)!r} is prepared already\n\n{summary(corpus.meta, vocabulary=corpus.vocabulary)}")


if __name__ == "__main__":
    command(main, name="prepare", schema=PrepareConfig)
