"""Formats: one text gives the same tokens however it is stored, and every damaged file is an error."""

import bz2
import gzip
import io
import json
import lzma
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lm.data.corpora.text import TextConfig, source
from lm.data.corpus import open_corpus
from lm.data.formats import ENDINGS, hold_out, text_files
from lm.data.source import SPLITS
from lm.system.errors import UserError
from tests.helpers.subword_text import make_text

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TEXT = make_text(1, lines=1500).replace("zé ba", "\n\n") + "\n \n last line"


def read(path: Path) -> bytes:
    return b"".join(chunk.data for file in text_files(path) for chunk in file.chunks(4096, within_lines=False))


def write(path: Path, records: list[str]) -> Path:
    """Write records in the format of the file's ending."""
    compress = COMPRESS.get(path.suffix, bytes)
    ending = path.with_suffix("").suffix if path.suffix in COMPRESS else path.suffix
    if ending == ".parquet":
        table, file = pyarrow.table({"id": range(len(records)), "text": records}), io.BytesIO()
        pyarrow.parquet.write_table(table, file, row_group_size=7)
        data = file.getvalue()
    elif ending in (".jsonl", ".ndjson"):
        data = "\n".join(json.dumps({"id": 1, "text": record}) for record in records).encode()
    elif ending == ".zip":
        with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.txt", "\n".join(records))
            archive.writestr("__MACOSX/._x.txt", b"\0\5\x16\7 attributes")
        data = file.getvalue()
    else:
        data = "\n".join(records).encode()
    path.write_bytes(compress(data))
    return path


@pytest.mark.parametrize("keep", ["drop", "keep"])
def test_every_format_gives_the_same_bytes(tmp_path: Path, keep: Any) -> None:
    lines, paragraphs = TEXT.split("\n"), TEXT.replace(" \n", " \n|").split("|")
    held_out = str(write(tmp_path / "other.txt", ["ba do"]))

    def prepared(name: str, records: list[str]) -> bytes:
        train = str(write(tmp_path / name, records))
        config = TextConfig(root=f"{tmp_path}/root", train=train, valid=held_out, test=held_out, blank_lines=keep)
        return (open_corpus(config).path / "train.bin").read_bytes()

    expected = prepared("x.txt", lines)
    assert len(expected) > 10_000
    for ending in ENDINGS:
        assert prepared(f"x{ending}", lines) == expected, ending
    for ending in (".jsonl", ".parquet"):  # records of several lines, most of which end with a line feed
        assert prepared(f"y{ending}", paragraphs) == expected, ending


@pytest.mark.parametrize("ending", COMPRESS)
def test_streams_are_complete_or_an_error(tmp_path: Path, ending: str) -> None:
    """Python's own readers ignore a damaged second stream of .xz and .bz2, and zstandard's a missing end."""
    data, compress, path = TEXT.encode(), COMPRESS[ending], tmp_path / f"x{ending}"
    padding = b"" if ending in (".bz2", ".zst") else bytes(8)
    first, second = compress(data[:99]), compress(data[99:])
    path.write_bytes(first + padding + second + padding)
    assert read(path) == data
    for position in (0, 2, len(second) // 2, len(second) - 1):
        damaged = bytearray(second)
        damaged[position] ^= 0x10
        for content in (first + bytes(damaged), first + second[: position or 1]):
            path.write_bytes(content)
            with pytest.raises(UserError, match=rf"x\{ending}' must be a complete"):
                read(path)


@pytest.mark.parametrize(("ending", "package"), [(".zst", "zstandard"), (".parquet", "pyarrow")])
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, package: str) -> None:
    path = write(tmp_path / f"x{ending}", ["a"])
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"Reading \{ending} files needs .* Try pip install {package}\."):
        read(path)


def held_out(path: Path, *, share: float, errors: str = "strict") -> list[bytes]:
    """Return the bytes of train, valid and test, both cut from train."""
    parts = hold_out(text_files(path), SPLITS[1:], share, path.parent, errors=errors)
    return [parts[split][0].open().read() for split in SPLITS]


def test_lines_are_held_out_by_hash(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(5000)] * 2
    parts = held_out(write(tmp_path / "x.jsonl", lines), share=0.1)
    sets = [set(part.decode().splitlines()) for part in parts]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 5000  # equal lines stay together
    assert [len(part.splitlines()) for part in parts] == [2 * len(part) for part in sets]
    assert all(400 < len(part) < 600 for part in sets[1:])
    shuffled = held_out(write(tmp_path / "y.txt", lines[::-1]), share=0.1)
    assert [set(part.decode().splitlines()) for part in shuffled] == sets


def test_missing_splits_are_cut_from_train(tmp_path: Path) -> None:
    lines = [f"w{number} w{number}" for number in range(2000)]
    train = str(write(tmp_path / "x[1].jsonl.gz", lines))  # brackets are part of the name
    config = TextConfig(root=f"{tmp_path}/root", train=train, holdout=0.2, min_count=1)
    corpus = open_corpus(config)
    tokens = {split: corpus.meta["splits"][split]["tokens"] for split in ("train", "valid", "test")}
    assert sum(tokens.values()) == 6000
    assert 3300 < tokens["train"] < 3900 and min(tokens.values()) > 900
    test = str(write(tmp_path / "test.txt", ["w1"]))
    one = open_corpus(TextConfig(root=config.root, train=train, test=test, holdout=0.2, min_count=1))
    assert one.meta["splits"]["valid"]["tokens"] == tokens["valid"]
    assert one.meta["splits"]["train"]["tokens"] == tokens["train"] + tokens["test"]


def test_invalid_byte_of_a_held_out_line_is_reported_with_its_offset(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"a\nb\nc\xff\n")
    with pytest.raises(UserError, match=r"x\.txt' must be UTF-8 text; got byte 0xff at offset 5"):
        held_out(tmp_path / "x.txt", share=0.3)
    (tmp_path / "y.txt").write_bytes(b"".join(b"%d\xff\n" % number for number in range(99)))
    replaced = b"".join(held_out(tmp_path / "y.txt", share=0.3, errors="replace")).decode()
    assert set(replaced.split()) == {f"{number}\ufffd" for number in range(99)}


def test_blank_lines_follow_the_line_before(tmp_path: Path) -> None:
    lines = [line for number in range(200) for line in (f"line {number}", "", "")]
    parts = held_out(write(tmp_path / "x.txt", lines), share=0.3)
    paragraphs = [paragraph for part in parts for paragraph in part.decode().split("line ")[1:]]
    assert len(paragraphs) == 200 and all(len(part) > 300 for part in parts)
    assert sum(paragraph.endswith("\n\n\n") for paragraph in paragraphs) >= 199  # the file ends without a newline


def test_long_window_of_zstandard(tmp_path: Path) -> None:
    """`zstd --long=31` writes such frames."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "x.txt.zst").write_bytes(compressor.compress(b"a b\n") + compressor.flush())
    assert read(tmp_path / "x.txt.zst") == b"a b\n"


def test_links_to_training_files_are_found(tmp_path: Path) -> None:
    train = write(tmp_path / "train.txt", ["a a"])
    (tmp_path / "valid.txt").symlink_to(train)
    (tmp_path / "test.txt").write_text("a")
    with pytest.raises(UserError, match=r"data\.train and data\.valid must name different files; .*valid\.txt"):
        source(TextConfig(dir=str(tmp_path)))


def test_folder_depends_on_splits_and_field(tmp_path: Path) -> None:
    """The same files in other splits, or other fields, are another corpus."""
    names = [str(write(tmp_path / f"{name}.txt", [f"{name} {name}"] * 9)) for name in "abcd"]
    first = TextConfig(train=names[:2], valid=names[2], test=names[3])
    second = TextConfig(train=names[0], valid=names[1:3], test=names[3])
    fields = [TextConfig(train=names[0], valid=names[1], test=names[2], field=field) for field in ("a b", "a_b")]
    folders = {source(config).folder for config in (first, second, *fields)}
    assert len(folders) == 4
