"""Speed and memory of turning a text file into ids on disk.

    python -m benchmarks.prepare PATH/train.txt

"prepared" is `data=text`: count, encode, check and write. "plain" is Python: split lines, count words in a Counter,
encode them with a dict. The peak memory is that of a separate process, including Python and compiled code.
"""

import argparse
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np

from benchmarks.harness import MIB, Step, make_parser, number, one_process, report, run, take_turns, timed
from lm.cli import compose_config as compose
from lm.config.schema import PrepareConfig
from lm.data.prepare import open_corpus
from lm.data.text.vocabulary import EOS, Vocabulary

SAMPLE = 1 << 20
"""Bytes of the file that also serve as validation and test text."""


def main(words: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("file", type=Path, help="a text file")
    parser.add_argument("--min-count", type=number, default=11)
    parser.add_argument("--no-plain", dest="plain", action="store_false", help="skip the plain form, which is slow")
    parser.set_defaults(repeats=5)
    return run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    file: Path = arguments.file.absolute()
    prepare = partial(prepared, file, arguments.min_count)
    ways: dict[str, Step] = {"prepared": prepare}
    if arguments.plain:
        ways["plain"] = partial(plain, file, arguments.min_count)
    seconds = take_turns({name: partial(timed, way) for name, way in ways.items()}, repeats=arguments.repeats)
    with one_process() as pool:
        peak = pool.submit(_peak_of, prepare).result()
    megabytes = file.stat().st_size / 1e6
    records = [
        {
            "way": name,
            "process s": value.process,
            "wall s": value.wall,
            "MB/s": megabytes / value.wall,
            "x plain, process": seconds["plain"].process / value.process if arguments.plain else None,
            "peak MiB": peak / MIB if name == "prepared" else None,
        }
        for name, value in seconds.items()
    ]
    report(records, out=arguments.out)


def prepared(file: Path, min_count: int) -> None:
    """Prepare the file as a corpus in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts")
        texts.mkdir()
        (texts / "train.txt").symlink_to(file)
        with file.open("rb") as text:
            sample = text.read(SAMPLE).decode(errors="ignore")
        for split in ("valid", "test"):
            (texts / f"{split}.txt").write_text(sample)
        settings = ["data=text", f"data.dir={texts}", f"data.root={folder}", f"data.min_count={min_count}"]
        config = compose(settings, name="prepare", schema=PrepareConfig)
        open_corpus(config.data)


def plain(file: Path, min_count: int) -> None:
    """Count in one pass, encode in another."""
    counts: Counter[str] = Counter()
    for words in _lines(file):
        counts.update(words)
    vocabulary = Vocabulary.from_counts(counts.items(), min_count=min_count)
    lookup, unk = vocabulary.ids.get, vocabulary.unk_id
    with tempfile.TemporaryFile() as output:
        for words in _lines(file):
            output.write(np.array(list(map(lookup, words, repeat(unk))), vocabulary.dtype).tobytes())


def _lines(file: Path) -> Iterator[list[str]]:
    with file.open() as text:
        for line in iter(partial(text.readline, 1 << 20), ""):  # long lines in pieces, to bound memory
            if words := line.split():
                yield [*words, EOS]


def _peak_of(way: Step) -> int:
    way()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
