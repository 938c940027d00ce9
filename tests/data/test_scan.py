"""The scanner gives the same vocabulary and ids as plain Python, for any text, wherever the pieces are cut."""

import io
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.data import encode, scan
from lm.data.reading import Part, Text
from lm.data.tokenize import SPACES, WHITESPACE, WORD_PATTERN, TokenRule
from lm.data.write import Content
from lm.errors import UserError

ODD = "aAbz <\n\r\t\v\f\x00\x1c\x85\xa0\u2028\u3000-'’._é\u0301ÀßİΣσςſK\u0345\u00ad:·9²Ⅷ中𝔘😀\ufeff"
"""Spaces of all kinds, joiners, letters of one to four bytes, those whose lower case is longer, shorter or depends."""
WORDS = ["</s>", "<unk>", "well-known", "isn’t", "ΟΔΟΣ", "İstanbul", "x" * 40, "\n", " \n", "<P>\n", "\r\n"]
TEXTS = st.lists(st.one_of(st.text(ODD), st.text(), st.sampled_from(WORDS)), max_size=12).map("".join)
BYTES = st.lists(st.one_of(TEXTS.map(str.encode), st.binary(max_size=6)), max_size=3).map(b"".join)
RULES = st.builds(
    TokenRule, st.sampled_from([WHITESPACE, SPACES, WORD_PATTERN]), lowercase=st.booleans(), skip_markup=st.booleans()
)


def text_of(parts: Mapping[str, list[bytes]], rule: TokenRule, **options: Any) -> Text:
    def part(data: bytes) -> Part:
        return Part("x", lambda: io.BytesIO(data))

    return Text({split: [part(data) for data in parts[split]] for split in parts}, rule, **options)


def everything(content: Content) -> dict[str, Any]:
    """All that preparation writes down."""
    found: dict[str, Any] = {"words": content.vocabulary.words, "counts": content.vocabulary.counts.tolist()}
    for split, blocks in content.splits.items():
        read = list(blocks)
        ids = np.concatenate([block.ids for block in read]).tolist() if read else []
        found[split] = ids, [sum(block[i] for block in read) for i in (1, 2, 3)]
    return found


def both_ways(text: Text, *, min_count: int, threads: int, piece_size: int) -> None:
    try:
        plainly: object = everything(encode.read_plainly(text, min_count=min_count))
    except UserError as error:
        plainly = str(error)
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            scanned: object = everything(
                scan.read_text(text, min_count=min_count, scratch=scratch, threads=threads, piece_size=piece_size)
            )
        except UserError as error:
            scanned = str(error)
    assert scanned == plainly


@settings(deadline=None, max_examples=300)
@given(
    st.lists(BYTES, max_size=4),
    st.lists(BYTES, max_size=2),
    RULES,
    st.sampled_from([None, None, 1, 3, 1000]),
    st.sampled_from(["strict", "replace"]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 5, 8, 64, 1 << 20]),
    st.sampled_from([1, 2]),
)
@example([b"a b", b"c\n"], [], TokenRule(WHITESPACE), None, "strict", 1, 1, 1)
@example(["Σ ΑΣ ΑΣ".encode()], [], TokenRule(WORD_PATTERN, lowercase=True), None, "strict", 1, 4, 1)
@example([b"\xef\xbb\xbf<P>\n\xef\xbb\xbfa"], [], TokenRule(SPACES, skip_markup=True), None, "strict", 1, 1, 2)
@example([b"<a b c\nd <e f\n<g"], [], TokenRule(WHITESPACE, skip_markup=True), None, "strict", 1, 2, 1)
@example([b"<\xff\n a\xff"], [], TokenRule(WHITESPACE, skip_markup=True), None, "strict", 1, 2, 1)
def test_the_scanner_is_plain_python_only_faster(
    train: list[bytes],
    test: list[bytes],
    rule: TokenRule,
    sentence_words: int | None,
    errors: str,
    min_count: int,
    piece_size: int,
    threads: int,
) -> None:
    text = text_of({"train": train, "test": test}, rule, sentence_words=sentence_words, errors=errors)
    both_ways(text, min_count=min_count, threads=threads, piece_size=piece_size)
