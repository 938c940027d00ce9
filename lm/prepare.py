"""Prepare a corpus, fetching it where need be, and say exactly what was done.

python -m lm.prepare data=text8
python -m lm.prepare data=europarl data.language=bg
python -m lm.prepare data=text data.dir=PATH
"""

from typing import TYPE_CHECKING

from lm.cli import command
from lm.config import PrepareConfig

if TYPE_CHECKING:
    from lm.data import Corpus


def main(config: PrepareConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.console import say
    from lm.data import open_corpus

    notices: list[str] = []

    def notice(text: str) -> None:
        notices.append(text)
        say(text)

    corpus = open_corpus(config.data, notice=notice)
    say(f"{str(corpus.path)!r} is prepared{'' if notices else ' already'}\n\n{report(corpus)}")


def report(corpus: "Corpus") -> str:
    """Source, checksum, rule and counts, as meta.json records them."""
    from lm.console import byte_size, table
    from lm.data import SPLITS

    meta, vocabulary = corpus.meta, corpus.vocabulary
    archive = meta.get("archive", {})
    facts = {"source": meta["source"]} | {key: archive[key] for key in ("path", "url", "sha256") if key in archive}
    if "size" in archive:
        facts["size"] = f"{archive['size']:,} bytes ({byte_size(archive['size'])})"
    facts |= meta["rule"]
    unknown, ends = (int(vocabulary.counts[number]) for number in (vocabulary.unk_id, vocabulary.eos_id))
    facts["vocabulary"] = (
        f"{len(vocabulary):,} words, among them <unk> ({unknown:,} times in training) and </s> ({ends:,})"
    )
    width = max(map(len, facts))
    lines = [f"{key.ljust(width)}  {value}" for key, value in facts.items()]
    rows = []
    for split in SPLITS:
        figures = meta["splits"][split]
        perplexity = f"{figures['unigram_perplexity']:.2f}"
        rows.append([split, f"{figures['tokens']:,}", f"{figures['oov']:,}", perplexity, figures["sha256"][:16]])
    return "\n".join([*lines, "", table(rows, header=["split", "tokens", "<unk>", "unigram perplexity", "sha256"])])


if __name__ == "__main__":
    command(main, name="prepare", schema=PrepareConfig)
