"""Parts are read as lines and as chunks; both hold every byte once, and wrong bytes are found where they are."""

import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.text.reading import Part, Text, total_size
from lm.data.text.tokenize import WHITESPACE, TokenRule
from lm.system.errors import UserError

MARK = b"\xef\xbb\xbf"
TEXTS = st.text(st.sampled_from("aé<\u2028\r\n  "), max_size=40)


def part(data: bytes, **options: int) -> Part:
    return Part("a\x1bb", lambda: io.BytesIO(data), **options)


@given(TEXTS, st.booleans())
def test_lines_end_at_line_feeds_alone_and_the_byte_order_mark_is_skipped(text: str, marked: bool) -> None:
    data = MARK * marked + text.encode()
    lines = [(offset, line) for offset, line in part(data).lines() if line]
    assert "".join(line.decode() for _, line in lines) == text
    assert len(lines) == len(text.removesuffix("\n").split("\n")) - (text == "")
    assert all(data[offset:].startswith(line) for offset, line in lines)


@given(TEXTS, st.booleans(), st.integers(1, 12))
def test_chunks_are_the_text_cut_at_line_ends_and_spaces(text: str, marked: bool, size: int) -> None:
    data = MARK * marked + text.encode()
    chunks = list(part(data).chunks(size))
    assert b"".join(chunk.data for chunk in chunks).decode() == text
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.data.endswith((b"\n", b" ")) for chunk in chunks[:-1])
    before = ""
    for chunk in chunks:
        line = before.rpartition("\n")[2]
        assert chunk.continues == bool(line)
        assert chunk.in_markup == line.startswith("<")
        assert data[chunk.offset :].startswith(chunk.data)
        before += chunk.data.decode()


@given(st.binary(max_size=30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 7))
def test_a_range_of_bytes_is_a_file_of_its_own(data: bytes, start: int, stop: int, size: int) -> None:
    stop = max(start, stop)
    ranged = part(data, start=start, stop=stop)
    wanted = data[start:stop].removeprefix(MARK if start == 0 else b"")
    assert b"".join(line for _, line in ranged.lines()) == wanted
    assert b"".join(chunk.data for chunk in ranged.chunks(size)) == wanted


def test_the_size_is_known_where_all_sizes_are() -> None:
    assert total_size([part(b"", size=3), part(b"", size=4)]) == 7
    assert total_size([part(b"", size=3), part(b"")]) is None
    assert total_size([]) == 0


@given(st.text(max_size=20), st.sampled_from([b"\xff", b"\x80", b"\xc0"]), st.integers(0, 9))
def test_a_wrong_byte_is_told_by_file_offset_and_option(before: str, wrong: bytes, start: int) -> None:
    text = Text({}, TokenRule(WHITESPACE))
    offset = start + len(before.encode())
    message = (
        rf"^'a\\x1bb' must be UTF-8 text; byte {wrong[0]:#04x} at offset {offset} .*data\.encoding_errors=replace$"
    )
    with pytest.raises(UserError, match=message):
        text.decode(before.encode() + wrong + b" rest\n", name="a\x1bb", offset=start)
    replaced = Text({}, TokenRule(WHITESPACE), errors="replace").decode(before.encode() + wrong, name="x", offset=0)
    assert replaced == before + "\ufffd"


def damaged(kind: str, path: Path) -> Part:
    text = b"some words of a text\n" * 1000
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.txt", text)
        data = bytearray(path.read_bytes())
        data[50] ^= 0xFF
        path.write_bytes(data)
        return Part(str(path), lambda: zipfile.ZipFile(path).open("x.txt"))
    compress, opens = {"gz": (gzip.compress, gzip.GzipFile), "xz": (lzma.compress, lzma.LZMAFile)}[kind]
    path.write_bytes(compress(text)[:-10])
    return Part(str(path), lambda: opens(path))


@pytest.mark.parametrize("kind", ["gz", "xz", "zip"])
def test_a_damaged_file_is_told(tmp_path: Path, kind: str) -> None:
    broken = damaged(kind, tmp_path / f"x.{kind}")
    for read in (broken.lines, broken.chunks):
        with pytest.raises(
            UserError, match=rf"x\.{kind}' must be a whole archive or compressed file; reading it failed"
        ):
            list(read())


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read 'here': Is a directory\. Check"):
        list(Part("here", lambda: tmp_path.open("rb")).lines())
