"""The user's own text: found again without reading it, and every mistake told."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.config import TextConfig
from lm.data import EOS, SPLITS, UNK, encode_folder, open_corpus
from lm.errors import UserError

Write = Callable[..., TextConfig]

TEXTS = st.text(st.sampled_from("abé \t\r\n\u2028\x85"), max_size=60).map(lambda text: text + "\nword\n")


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, TEXTS, st.booleans(), st.integers(1, 3))
def test_ids_are_those_of_the_plain_definition(
    text_folder: Write, train: str, test: str, lowercase: bool, min_count: int
) -> None:
    config = text_folder(train=train, test=test, lowercase=lowercase, min_count=min_count)
    corpus = open_corpus(config)

    def tokens(text: str) -> list[str]:
        lines = (text.lower() if lowercase else text).split("\n")
        return [word for line in lines if line.split() for word in [*line.split(), EOS]]

    words = tokens(train)
    for split, text in [("train", train), ("test", test)]:
        expected = [w if w == EOS or words.count(w) >= min_count else UNK for w in tokens(text)]
        assert corpus.vocabulary.decode(corpus.split(split)) == expected


def test_a_second_use_prepares_nothing(text_folder: Write) -> None:
    notices: list[str] = []
    config = text_folder()
    first = open_corpus(config, notice=notices.append)
    again = open_corpus(config, notice=notices.append)
    assert again.path == first.path
    assert len(notices) == 1
    assert notices[0].startswith(f"preparing {str(first.path)!r}")


def test_changed_text_or_rule_is_another_corpus(text_folder: Write) -> None:
    paths = [
        open_corpus(text_folder(**change)).path
        for change in ({}, {"test": "b z z\n"}, {"lowercase": True}, {"min_count": 1}, {})
    ]
    assert len(set(paths)) == 4
    assert paths[0] == paths[4]


def test_old_files_are_found_again_without_being_read(text_folder: Write) -> None:
    config = text_folder()
    train = Path(str(config.dir)) / "train.txt"
    for split in SPLITS:
        os.utime(Path(str(config.dir)) / f"{split}.txt", (1_000_000_000, 1_000_000_000))
    first = open_corpus(config)
    # The same size and time: if the file were read, its change would show.
    train.write_text(train.read_text().replace("a", "q"))
    os.utime(train, (1_000_000_000, 1_000_000_000))
    assert open_corpus(config).path == first.path
    os.utime(train, (1_000_000_001, 1_000_000_001))
    assert open_corpus(config).path != first.path


@pytest.mark.parametrize("content", ["nonsense", "[]", '{"x": 1}'])
def test_a_damaged_memory_of_hashes_does_not_matter(text_folder: Write, content: str) -> None:
    config = text_folder()
    first = open_corpus(config)
    (Path(config.root) / ".text-hashes.json").write_text(content)
    assert open_corpus(config).path == first.path


def test_folder_names_become_safe(text_folder: Write) -> None:
    path = open_corpus(text_folder(name="my texts\x1b[31m é=1,2")).path
    assert path.name.startswith("text-my_texts_31m_1_2-")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": ""}, r"valid\.txt' must hold at least one word"),
        ({"train": " \n\t\n"}, r"train\.txt' must hold at least one word"),
        ({"test": b"ok\nab\xffc\n"}, r"test\.txt' must be UTF-8 text; byte 0xff at offset 5"),
    ],
)
def test_bad_text_is_told_and_nothing_is_left(text_folder: Write, change: dict[str, str], message: str) -> None:
    config = text_folder(**change)
    with pytest.raises(UserError, match=message):
        open_corpus(config)
    assert [path.name for path in Path(config.root).iterdir() if path.name != ".text-hashes.json"] == []


def test_missing_files_are_named(text_folder: Write) -> None:
    config = text_folder()
    (Path(str(config.dir)) / "valid.txt").unlink()
    (Path(str(config.dir)) / "test.txt").unlink()
    with pytest.raises(UserError, match=r"has no valid\.txt, test\.txt"):
        open_corpus(config)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere\x1b", r"nowhere\\x1b', which does not exist"), ("file", "not a folder"), ("x\0y", r"x\\x00y.*null")],
)
def test_a_wrong_folder_is_told(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"(?s)data\.dir must name a folder.*{reason}"):
        open_corpus(TextConfig("text", str(tmp_path), str(tmp_path / name), False, 2))


def test_no_folder_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.dir must name a folder.*got None"):
        open_corpus(TextConfig("text", str(tmp_path), None, False, 2))


def test_another_folder_is_read_by_the_runs_own_rule(text_folder: Write) -> None:
    corpus = open_corpus(text_folder(lowercase=True))
    other = text_folder(name="other", train="A q\n\nB <unk> </s>\n", valid="a\n", test="b")
    encoded = encode_folder(
        str(other.dir), data_config={"name": "text", "lowercase": True}, vocabulary=corpus.vocabulary
    )
    texts = {split: " ".join(corpus.vocabulary.decode(ids)) for split, ids in encoded.items()}
    assert texts == {"train": "a <unk> </s> b <unk> </s> </s>", "valid": "a </s>", "test": "b </s>"}
    (Path(str(other.dir)) / "train.txt").unlink()
    cased = encode_folder(str(other.dir), data_config=other, vocabulary=corpus.vocabulary)
    assert list(cased) == ["valid", "test"]
    assert cased["test"].dtype == corpus.split("test").dtype


def test_another_folder_without_text_is_told(text_folder: Write, tmp_path: Path) -> None:
    config = text_folder(valid="x", test="\n")
    vocabulary = open_corpus(text_folder(name="sound")).vocabulary
    with pytest.raises(UserError, match=r"test\.txt' must hold at least one word"):
        encode_folder(str(config.dir), data_config=config, vocabulary=vocabulary)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.dir must hold at least one of train\.txt"):
        encode_folder(str(tmp_path / "empty"), data_config=config, vocabulary=vocabulary)
    with pytest.raises(UserError, match="does not exist"):
        encode_folder(str(tmp_path / "nowhere"), data_config=config, vocabulary=vocabulary)
