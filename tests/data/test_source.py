"""Text files: chunks contain every byte once, and damage and invalid bytes are reported with their file."""

import io
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.config.groups import find_plugin, plugin_names
from lm.data.source import TextFile, decode, read_lines
from lm.system.errors import UserError
from tests.conftest import ROOT

MARK = b"\xef\xbb\xbf"
TEXTS = st.text(st.sampled_from("aé<\u2028\r\n  "), max_size=40)


def in_memory(data: bytes) -> TextFile:
    return TextFile("a\x1bb", lambda: io.BytesIO(data), len(data))


@given(TEXTS, st.booleans(), st.integers(3, 12), st.booleans())
def test_chunks_are_the_text_cut_after_lines_or_before_words(
    text: str, marked: bool, size: int, within_lines: bool
) -> None:
    data = MARK * marked + text.encode()
    chunks = list(in_memory(data).chunks(size, within_lines=within_lines))
    assert b"".join(chunk.data for chunk in chunks).decode() == text
    assert [chunk.ends_file for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for chunk, following in pairwise(chunks):
        cut_in_line = within_lines and chunk.data.endswith(b" ") and following.data.startswith(b"a")
        assert chunk.data.endswith(b"\n") or cut_in_line
    assert all(data[chunk.offset :].startswith(chunk.data) for chunk in chunks)


@given(st.binary(max_size=30), st.integers(0, 30), st.integers(0, 30), st.integers(3, 7))
def test_range_of_bytes_is_read_like_a_file(data: bytes, start: int, stop: int, size: int) -> None:
    stop = max(start, stop)
    chunks = in_memory(data).cut(start, stop).chunks(size, within_lines=True)
    expected = data[start:stop].removeprefix(MARK if start == 0 else b"")
    assert b"".join(chunk.data for chunk in chunks) == expected


@given(TEXTS, st.booleans())
def test_lines_end_only_at_line_feeds(text: str, marked: bool) -> None:
    lines = list(read_lines(io.BytesIO(MARK * marked + text.encode()), name="x"))
    assert "".join(lines) == text
    assert all(line.endswith("\n") for line in lines[:-1])
    assert not any("\n" in line[:-1] for line in lines)


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    st.sampled_from([b"\xff", b"\x80", b"\xc0", b"\0"]),
    st.integers(0, 9),
)
def test_invalid_byte_is_reported_with_file_and_offset(before: str, wrong: bytes, start: int) -> None:
    offset = start + len(before.encode())
    with pytest.raises(UserError, match=rf"'a\\x1bb' .*{wrong[0]:#04x} at offset {offset}\..*data\.encoding_errors"):
        decode(before.encode() + wrong + b" rest\n", errors="strict", name="a\x1bb", offset=start)
    assert decode(before.encode() + wrong, errors="replace", name="x", offset=0) == before + "\ufffd"


# ---- settings --------------------------------------------------------------------------------------------------------


NAMES = plugin_names("data")


def test_corpora_are_the_files_of_their_folder() -> None:
    assert {"europarl", "one_billion_word", "pydoc", "text", "text8", "wikitext2", "zipf"} <= set(NAMES)
    with pytest.raises(KeyError):
        find_plugin("data", "nonsense")


def test_no_corpus_imports_torch_or_numba() -> None:
    finds = "; ".join(f"find_plugin('data', {name!r})" for name in NAMES)
    check = f"import sys\nfrom lm.config.groups import find_plugin\n{finds}\n"
    check += "assert not {'torch', 'numba', 'sentencepiece'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
