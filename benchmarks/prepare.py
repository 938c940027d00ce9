"""Speed and memory of turning a text file into ids on disk, as `data=text` does: count, encode, check and write.

    python -m benchmarks.prepare PATH/train.txt

"peak MiB": memory that preparation adds to a process.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import make_parser, peak_mib, report, run, take_turns, timed
from lm.cli import compose_config as compose
from lm.config.schema import PrepareConfig
from lm.data.prepare import open_corpus

SAMPLE = 1 << 20
"""Bytes of the file that also serve as validation and test text."""


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("file", type=Path, help="a text file")
    parser.set_defaults(repeats=5)
    run(measure, parser, words)


def measure(arguments: argparse.Namespace) -> None:
    file: Path = arguments.file.absolute()
    seconds = take_turns({"prepare": partial(timed, prepare, file)}, repeats=arguments.repeats)["prepare"]
    speed, peak = file.stat().st_size / 1e6 / seconds.wall, peak_mib(partial, prepare, file)
    record = {"process s": seconds.process, "wall s": seconds.wall, "MB/s": speed, "peak MiB": peak}
    report([record], out=arguments.out)


def prepare(file: Path) -> None:
    """Prepare the file as a corpus in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts")
        texts.mkdir()
        (texts / "train.txt").symlink_to(file)
        with file.open("rb") as text:
            sample = text.read(SAMPLE).decode(errors="ignore")
        for split in ("valid", "test"):
            (texts / f"{split}.txt").write_text(sample)
        settings = ["data=text", f"data.dir={texts}", f"data.root={folder}", "data.min_count=11"]
        open_corpus(compose(settings, name="prepare", schema=PrepareConfig).data)


if __name__ == "__main__":
    main()
