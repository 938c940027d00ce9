"""Speed and memory of turning a text file into ids on disk.

    python -m benchmarks.prepare PATH/train.txt

"prepared" is `data=text`: count, encode, check and write. "plain" is Python: split lines, count words in a Counter,
encode them with a dict. "peak MiB": memory that preparation adds to a process.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np

from benchmarks.harness import Step, make_parser, peak_mib, report, run, take_turns, timed
from lm.cli import compose_config as compose
from lm.config.schema import PrepareConfig
from lm.data.prepare import open_corpus
from lm.data.text.vocabulary import EOS, Vocabulary

SAMPLE = 1 << 20
"""Bytes of the file that also serve as validation and test text."""
MIN_COUNT = 11


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("file", type=Path, help="a text file")
    parser.set_defaults(repeats=5)
    run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    file: Path = arguments.file.absolute()
    ways: dict[str, Step] = {"prepared": partial(prepared, file), "plain": partial(plain, file)}
    seconds = take_turns({name: partial(timed, way) for name, way in ways.items()}, repeats=arguments.repeats)
    peak = peak_mib(partial, prepared, file)
    megabytes = file.stat().st_size / 1e6
    report(
        (
            {
                "way": name,
                "process s": value.process,
                "wall s": value.wall,
                "MB/s": megabytes / value.wall,
                "x plain, process": seconds["plain"].process / value.process,
                "peak MiB": peak if name == "prepared" else None,
            }
            for name, value in seconds.items()
        ),
        out=arguments.out,
    )


def prepared(file: Path) -> None:
    """Prepare the file as a corpus in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts")
        texts.mkdir()
        (texts / "train.txt").symlink_to(file)
        with file.open("rb") as text:
            sample = text.read(SAMPLE).decode(errors="ignore")
        for split in ("valid", "test"):
            (texts / f"{split}.txt").write_text(sample)
        settings = ["data=text", f"data.dir={texts}", f"data.root={folder}", f"data.min_count={MIN_COUNT}"]
        config = compose(settings, name="prepare", schema=PrepareConfig)
        open_corpus(config.data)


def plain(file: Path) -> None:
    """Count in one pass, encode in another."""
    counts: Counter[str] = Counter()
    for words in _lines(file):
        counts.update(words)
    vocabulary = Vocabulary.from_counts(counts.items(), min_count=MIN_COUNT)
    lookup, unk = vocabulary.ids.get, vocabulary.unk_id
    with tempfile.TemporaryFile() as output:
        for words in _lines(file):
            output.write(np.array(list(map(lookup, words, repeat(unk))), vocabulary.dtype).tobytes())


def _lines(file: Path) -> Iterator[list[str]]:
    with file.open() as text:
        for line in iter(partial(text.readline, 1 << 20), ""):  # long lines in pieces, to bound memory
            if words := line.split():
                yield [*words, EOS]


if __name__ == "__main__":
    main()
