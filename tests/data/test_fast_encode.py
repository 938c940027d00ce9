"""The scanner gives the same vocabulary and ids as plain Python, for any text, wherever the pieces are cut."""

import io
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.config.groups import DataConfig
from lm.data import encode, fast_encode
from lm.data.corpora.text import TextConfig
from lm.data.corpus import SPLITS
from lm.data.opening import open_corpus
from lm.data.text.reading import Part, Text
from lm.data.text.tokenize import SPACES, WHITESPACE, WORD_PATTERN, TokenRule
from lm.data.text.vocabulary import Vocabulary
from lm.data.word_table import JOINER, LINE_END, SINGLE, SPACE, WORD
from lm.data.write import Content
from lm.system.errors import UserError
from tests.helpers.archives import EUROPARL, TEXT8, billion, europarl, one_billion_word, text8, write_folder

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
        starts = np.cumsum([0, *(len(block.ids) for block in read)]).tolist()
        part_ends = [start + end for start, block in zip(starts, read, strict=False) for end in block.part_ends]
        found[split] = ids, part_ends, [sum(block[i] for block in read) for i in (1, 2, 3)]
    return found


def both_ways(text: Text, *, min_count: int, threads: int, chunk_size: int) -> None:
    try:
        plainly: object = everything(encode.read_plainly(text, min_count=min_count))
    except UserError as error:
        plainly = str(error)
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            scanned: object = everything(
                fast_encode.read_text(
                    text, min_count=min_count, scratch=scratch, threads=threads, chunk_size=chunk_size
                )
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
    chunk_size: int,
    threads: int,
) -> None:
    text = text_of({"train": train, "test": test}, rule, sentence_words=sentence_words, errors=errors)
    both_ways(text, min_count=min_count, threads=threads, chunk_size=chunk_size)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_words_long_words_and_long_lines(threads: int) -> None:
    """More words than a table has room for at first, and a word and a line of many pieces."""
    words = [f"{number:x}é{'y' * (number % 7)}" for number in range(120_000)]
    data = " ".join(words + words[:50_000]) + "\n" + "z" * 300_000 + " " + "w " * 200_000 + "\n\nend"
    text = text_of({"train": [data.encode(), b"end"], "test": [b"new " + data[:1000].encode()]}, TokenRule(WHITESPACE))
    both_ways(text, min_count=2, threads=threads, chunk_size=1 << 14)


@settings(deadline=None)
@given(st.sampled_from([WHITESPACE, SPACES, WORD_PATTERN]), st.characters())
def test_kinds_are_those_of_the_pattern(pattern: str, character: str) -> None:
    kind = fast_encode.kinds_of(pattern, lines=True)[ord(character)]
    alone, joined = re.findall(pattern, character), re.findall(pattern, f"a{character}a")
    if character == "\n":
        assert kind == LINE_END
    elif not alone:
        assert kind == SPACE and joined == ["a", "a"]
    elif len(joined) == 1:
        assert kind == (WORD if len(re.findall(pattern, f"{character}a")) == 1 else JOINER)
    else:
        assert kind == SINGLE and joined == ["a", character, "a"]


def test_a_vocabulary_that_is_given_is_used(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts([("b", 3), ("a", 2)], min_count=1)
    text = text_of({"train": [b"a c a\nb"], "test": [b"c"], "valid": []}, TokenRule(WHITESPACE))
    found = fast_encode.encode_text(text, vocabulary=vocabulary, scratch=tmp_path, threads=2)
    plain = encode.encode_plainly(text, vocabulary=vocabulary)
    assert everything(Content(vocabulary, found)) == everything(Content(vocabulary, plain))
    assert list(tmp_path.iterdir()) == []


def test_results_come_in_order_and_not_far_ahead() -> None:
    begun: list[int] = []

    def slow_first(number: int) -> int:
        begun.append(number)
        time.sleep(0.02 * (number % 3 == 0))
        return number

    results = fast_encode.in_order(slow_first, iter(range(40)), threads=3)
    assert next(results) == 0
    assert len(begun) <= 8
    assert [0, *results] == list(range(40))


def test_an_error_in_a_thread_is_the_readers() -> None:
    with pytest.raises(ZeroDivisionError):
        list(fast_encode.in_order(lambda number: 1 // (number - 5), iter(range(100)), threads=2))


@pytest.mark.parametrize("kind", ["text8", "europarl", "one_billion_word", "text"])
def test_every_corpus_is_the_same_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = tmp_path / "source"
    match kind:
        case "text8":
            write_folder(folder, {"text8": TEXT8})
            config: DataConfig = text8(tmp_path, folder)
        case "europarl":
            config = europarl(tmp_path, write_folder(folder, EUROPARL))
        case "one_billion_word":
            config = one_billion_word(tmp_path, write_folder(folder, billion()))
        case "text":
            write_folder(folder, {f"{split}.txt": "Ein Ölfaß\n\nΣΑΣ ein\n" for split in SPLITS})
            config = TextConfig("text", "", 2, dir=str(folder), lowercase=True)
    contents = []
    for root, small in [("plainly", 1 << 30), ("scanned", 0)]:
        monkeypatch.setattr(encode, "SMALL", small)
        path = open_corpus(replace(config, root=str(tmp_path / root))).path
        contents.append({file.name: file.read_bytes() for file in path.iterdir()})
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == ["meta.json", "test.bin", "train.bin", "valid.bin", "vocab.tsv"]
    shards = [6 * number for number in range(1, 100)] if kind == "one_billion_word" else None
    assert json.loads(contents[0]["meta.json"])["splits"]["train"].get("shard_ends") == shards


@pytest.mark.parametrize(("sizes", "large"), [([99], False), ([100], False), ([101], True), ([60, 41], True)])
def test_small_texts_and_unknown_rules_take_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], large: bool
) -> None:
    monkeypatch.setattr(encode, "SMALL", 100)
    for filling in (b"a", b"a\n", b"a "):
        parts = {"train": [(filling * size)[:size] for size in sizes], "test": []}
        assert encode._for_scanner(text_of(parts, TokenRule(WHITESPACE))) == large
        assert not encode._for_scanner(text_of(parts, TokenRule("[a-z]")))
