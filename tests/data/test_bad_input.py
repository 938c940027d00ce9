"""Bad input: one paragraph that names the file or the key, exit code 2, and nothing written."""

import bz2
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lm import cli
from lm.config.schema import PrepareConfig
from lm.data.corpus import open_corpus
from tests.conftest import composed

TEXT = b"a b a\nb c\n" * 200
GOOD = "data.valid=good.txt data.test=good.txt"
TRAIN, DIR, WIKITEXT = f"{GOOD} data.train=", "data.dir=.", "data=wikitext2 data.archive=x.zip"
MEMBERS = [f"wiki.{split}.tokens" for split in ("train", "valid", "test")]


def parquet(**columns: list[object]) -> bytes:
    pyarrow.parquet.write_table(pyarrow.table(columns), file := io.BytesIO())
    return file.getvalue()


def zipped(*names: str) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(name, TEXT)
    return file.getvalue()


def records(*values: object) -> bytes:
    return "\n".join(map(json.dumps, values)).encode()


BAD: list[tuple[str, bytes, str, str]] = [
    ("x.txt", b"", TRAIN, "The train split must contain at least one word; got none from"),
    ("x.txt", b"\n \n\t\n", TRAIN, "The train split must contain at least one word"),
    ("x.txt", b"\n \n\t\n", f"data.blank_lines=keep {TRAIN}", "The train split must contain at least one word"),
    ("x.txt", b"a\0b\n", TRAIN, "x.txt' must be UTF-8 text; got byte 0x00 at offset 1."),
    ("x.txt", "a b\n".encode("utf-16-be"), TRAIN, "x.txt' must be UTF-8 text; got byte 0x00 at offset 0."),
    ("x.txt", b"ab\n\xff\n", TRAIN, "x.txt' must be UTF-8 text; got byte 0xff at offset 3."),
    ("folder/x.txt", TEXT, f"data.train=folder {GOOD}", "'folder' is a folder. Try data.train=folder/*.txt."),
    ("x.jsonl", records({"text": "a"}, {"body": "b", "id": 1}), TRAIN, "line 2 has none (fields: body, id)."),
    ("x.jsonl", b'{"text": "a"}\n{"text": \n', TRAIN, "x.jsonl' must have a text in the field 'text'; line 2 is not"),
    ("x.jsonl", records(["text"]), TRAIN, "line 1 is not a JSON object."),
    ("x.jsonl", records({"text": 7}), TRAIN, "line 1 has 7."),
    ("x.ndjson", records({"text": "a"}, {"text": None}), TRAIN, "line 2 has null."),
    ("x.jsonl", records({"text": "a \ud800"}), TRAIN, "x.jsonl' must be UTF-8 text; got byte 0xed"),
    ("x.jsonl", b'{"text": "\xff"}\n', TRAIN, "x.jsonl' must be UTF-8 text; got byte 0xff at offset 10."),
    ("x.jsonl.zst", zstandard.compress(records({"a": "b"})), f"data.field=b {TRAIN}", "in the field 'b'; line 1"),
    ("x.parquet", parquet(body=["a"], id=[1]), TRAIN, "the file has none (fields: body, id). Try data.field=NAME."),
    ("x.parquet", parquet(text=["a", None]), TRAIN, "row 2 has None."),
    ("x.parquet", parquet(text=[1, 2]), TRAIN, "row 1 has 1."),
    ("x.parquet", b"PAR1 nonsense PAR1", TRAIN, "x.parquet' must be a complete archive or compressed file"),
    ("x.txt.gz", b"", TRAIN, "x.txt.gz' must be a complete archive or compressed file; reading it failed (it ends"),
    ("x.txt.xz", lzma.compress(TEXT)[:-9], TRAIN, "x.txt.xz' must be a complete"),
    ("x.txt.bz2", bz2.compress(TEXT)[:-9], TRAIN, "x.txt.bz2' must be a complete"),
    ("x.txt.zst", b"nonsense", TRAIN, "x.txt.zst' must be a complete"),
    ("x.zip", b"nonsense", TRAIN, "x.zip' must be a complete"),
    ("x.zip", zipped("readme"), TRAIN, "x.zip' must contain .txt files"),
    ("x.zip", zipped("../wiki.train.tokens"), WIKITEXT, "'x.zip' lacks wiki.train.tokens"),
    ("x.zip", zipped(*MEMBERS), WIKITEXT, "sha1 863f29c4"),
    ("x.txt", TEXT, f"{GOOD} data.train=[x.txt,y.txt]", "'y.txt' matches nothing in"),
    ("x.txt", TEXT, f"{GOOD} data.train=[x.txt,2]", "data.train must be a file, a pattern"),
    ("x.txt", TEXT, "data.train=good.txt data.valid=good.txt data.test=x.txt", "data.train and data.valid must name"),
    ("train.txt", TEXT, DIR, "lacks valid.txt, test.txt. Put it there"),
    ("valid.txt", TEXT, f"{DIR} data.holdout=0.1", "lacks train.txt, test.txt."),
    ("x.txt", b"one line\n", "data.min_count=1 data.train=x.txt data.holdout=0.01", "leaves none for valid"),
    ("x.json.gz", b"{}", TRAIN, "got .json. Convert it to .jsonl"),
    ("x.csv", TEXT, TRAIN, "got .csv. Convert it to .jsonl"),
    ("x.txt", TEXT, f"data.holdout=0.1 {TRAIN}", "data.holdout must be null if no split is missing; got 0.1."),
]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("name", "data", "settings", "expected"), BAD)
def test_bad_input_is_one_paragraph_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, settings: str, expected: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
    (tmp_path / "good.txt").write_bytes(TEXT)
    before = contents(tmp_path)
    overrides = (settings + name if settings.endswith("=") else settings).split()
    overrides += [] if "data=wikitext2" in overrides else ["data=text"]
    monkeypatch.chdir(tmp_path)
    job: Callable[[], object] = lambda: open_corpus(composed(*overrides, name="prepare").data)  # noqa: E731
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as exit_:
        cli.run(job, name="prepare", schema=PrepareConfig)
    assert exit_.value.code == 2
    assert expected in errors.getvalue()
    assert len(errors.getvalue().splitlines()) == 1
    assert contents(tmp_path) == before
