"""The user's own text: all forms of files, the plain definition of tokens, and errors that name the key."""

import gzip
import itertools
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.data.corpora.text import TextConfig
from lm.data.corpus import open_corpus
from lm.data.prepare import encode_folder
from lm.data.source import SPLITS
from lm.data.text.vocabulary import EOS, UNK
from lm.system.errors import UserError
from tests.helpers.plain_encode import plain_text

Write = Callable[..., TextConfig]

TEXTS = st.text(st.sampled_from("abé \t\r\n\u2028\x85"), max_size=60).map(lambda text: text + "\nword word word\n")


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, TEXTS, st.booleans(), st.integers(1, 3))
def test_tokens_equal_the_plain_definition(
    text_folder: Write, train: str, test: str, lowercase: bool, min_count: int
) -> None:
    config = text_folder(train=train, test=test, lowercase=lowercase, min_count=min_count)
    corpus = open_corpus(config)
    words = plain_text([train.encode()], config.token_rule).tokens
    for split, text in [("train", train), ("test", test)]:
        tokens = plain_text([text.encode()], config.token_rule).tokens
        expected = [token if token == EOS or words.count(token) >= min_count else UNK for token in tokens]
        assert corpus.vocabulary.decode(corpus.split(split)) == expected


def test_prepared_once(text_folder: Write, capsys: pytest.CaptureFixture[str]) -> None:
    config = text_folder()
    assert open_corpus(config).path == open_corpus(config).path
    assert capsys.readouterr().out.count("preparing ") == 1


def test_changed_text_or_settings_are_another_corpus(text_folder: Write) -> None:
    config = text_folder()
    changes: list[dict[str, Any]] = [{}, {"lowercase": True}, {"min_count": 1}, {"max_words": 1}]
    paths = [open_corpus(replace(config, **change)).path for change in changes]
    paths.append(open_corpus(text_folder(test="b z z\n")).path)
    os.utime(Path(str(config.dir)) / "train.txt", (1, 1))
    paths.append(open_corpus(config).path)
    assert len(set(paths)) == len(paths)


def test_folder_names_become_safe(text_folder: Write) -> None:
    path = open_corpus(text_folder(name="my texts\x1b[31m é=1,2")).path
    assert path.name.startswith("text-my_texts_31m_1_2-")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": ""}, r"valid split .*valid\.txt'"),
        ({"train": "a b\n"}, r"data\.min_count=1"),
    ],
)
def test_invalid_text_raises_and_leaves_nothing(text_folder: Write, change: dict[str, str], message: str) -> None:
    config = text_folder(**change)
    with pytest.raises(UserError, match=message):
        open_corpus(config)
    assert list(Path(config.root).iterdir()) == []


def test_invalid_bytes_are_replaced_on_request(text_folder: Write) -> None:
    corpus = open_corpus(text_folder(train=b"a\xff a\xff\n", errors="replace"))
    assert corpus.vocabulary.decode(corpus.split("train")) == ["a\ufffd", "a\ufffd", EOS]


def test_blank_lines_are_reported_and_kept_on_request(text_folder: Write, capsys: pytest.CaptureFixture[str]) -> None:
    config = text_folder(train="\n a a\n\n  \nb b", valid=" \na\n")
    for blank_lines, expected, note in [
        ("drop", "a a </s> b b </s>", "60.0% of the training lines are blank; they are ignored."),
        ("keep", "</s> a a </s> </s> </s> b b </s>", "60.0% of the training lines are blank; each counts as"),
    ]:
        corpus = open_corpus(replace(config, blank_lines=blank_lines))
        assert " ".join(corpus.vocabulary.decode(corpus.split("train"))) == expected
        assert f"note: {note}" in capsys.readouterr().out
        assert corpus.meta["splits"]["train"]["blank_lines"] == 3
    open_corpus(text_folder(name="few", train="a a\n" * 99 + "\n"))
    assert "blank;" not in capsys.readouterr().out


# ---- files -------------------------------------------------------------------------------------------------------

SPLIT_TEXTS = {"train": "a b a\nb c\n", "valid": "a c\n", "test": "b z\n"}
FORMS = [".txt", ".txt.gz", ".zip", "folder"]


def write_form(folder: Path, split: str, form: str) -> None:
    """Write the text of a split in one of the forms of data.dir."""
    text = SPLIT_TEXTS[split].encode()
    first, second = text[:2], text[2:]  # cut inside a line, which the end of the file ends
    match form:
        case ".zip":
            with zipfile.ZipFile(folder / f"{split}.zip", "w") as archive:
                for name, data in [("b.txt", second), ("a.txt", first), ("readme.md", b"x")]:
                    archive.writestr(name, data)
        case "folder":
            (folder / split).mkdir()
            for name, data in [("2.txt.gz", gzip.compress(second)), ("1.txt", first), (".hidden", b"x")]:
                (folder / split / name).write_bytes(data)
        case _:
            (folder / f"{split}{form}").write_bytes(gzip.compress(text) if form.endswith(".gz") else text)


def config_of(folder: Path, **settings: Any) -> TextConfig:
    return TextConfig(root=str(folder / "root"), min_count=1, **{"dir": str(folder)} | settings)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_text(tmp_path: Path, form: str) -> None:
    for split in SPLITS:
        write_form(tmp_path, split, form if split == "train" else ".txt")
    corpus = open_corpus(config_of(tmp_path))
    texts = {split: " ".join(corpus.vocabulary.decode(corpus.split(split))) for split in SPLITS}
    cut = "a </s> b a" if form in (".zip", "folder") else "a b a"
    assert texts == {"train": f"{cut} </s> b c </s>", "valid": "a c </s>", "test": "b <unk> </s>"}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(FORMS, 2)])
def test_two_forms_of_a_split_raise(tmp_path: Path, one: str, other: str) -> None:
    for split, form in [("train", ".txt"), ("test", ".txt"), ("valid", one), ("valid", other)]:
        write_form(tmp_path, split, form)
    with pytest.raises(UserError, match=r"valid.* and valid.*data\.valid=PATTERN"):
        open_corpus(config_of(tmp_path))


def test_patterns_name_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"news/2.txt": "c\n", "news/1.txt": "b\n", "news/old/3.text": "a", "v": "b", "t.txt": "c"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, dir=None, train="news/**/*.t*xt", valid="v", test=str(tmp_path / "[t]*"))
    corpus = open_corpus(config)
    assert corpus.vocabulary.decode(corpus.split("train")) == ["b", EOS, "c", EOS, "a", EOS]
    assert corpus.vocabulary.decode([*corpus.split("valid"), *corpus.split("test")]) == ["b", EOS, "c", EOS]
    assert corpus.meta["files"]["train"] == [str(tmp_path / "news" / name) for name in ("1.txt", "2.txt", "old/3.text")]
    with pytest.raises(UserError, match=r"data\.test .*'x\*'"):
        open_corpus(replace(config, test="x*"))
    with pytest.raises(UserError, match=r"data\.train and data\.valid .*1\.txt'"):
        open_corpus(replace(config, valid="news/1*"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train/.hidden", b"", "train' must .*nothing"),
        ("train/x.md", b"", r"train' must .*'x\.md'"),
        ("train.zip", b"PK\x05\x06" + bytes(18), r"train\.zip' must contain \.txt files"),
        ("train.text", b"", r"data\.train=PATTERN"),
    ],
)
def test_damaged_and_unexpected_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    for split in ("valid", "test"):
        write_form(tmp_path, split, ".txt")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        open_corpus(config_of(tmp_path))
    assert [path.name for path in (tmp_path / "root").glob("*")] == []


@pytest.mark.parametrize("name", ["nowhere\x1b", "file", "x\0y", None])
def test_wrong_folder_is_a_user_error(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.dir=PATH"):
        open_corpus(config_of(tmp_path, dir=name and str(tmp_path / name)))


# ---- text of another folder --------------------------------------------------------------------------------------


def test_other_folder_is_encoded_by_the_rule_of_the_run(text_folder: Write) -> None:
    corpus = open_corpus(text_folder(lowercase=True))
    other = text_folder(name="other", train="A q\n\nB <unk> </s>\n", valid="a\n", test="b")
    folded = replace(other, lowercase=True)
    encoded = encode_folder(str(other.dir), data_config=folded, vocabulary=corpus.vocabulary)
    texts = {split: " ".join(corpus.vocabulary.decode(text.tokens)) for split, text in encoded.items()}
    assert texts == {"train": "a <unk> </s> b <unk> </s> </s>", "valid": "a </s>", "test": "b </s>"}
    sizes = [(len(text.tokens), text.num_words, text.num_characters) for text in encoded.values()]
    assert sizes == [(7, 7, 18), (2, 2, 2), (2, 2, 1)]
    (Path(str(other.dir)) / "train.txt").unlink()
    cased = encode_folder(str(other.dir), data_config=other, vocabulary=corpus.vocabulary)
    assert list(cased) == ["valid", "test"]
    assert cased["test"].tokens.dtype == corpus.split("test").dtype


def test_other_folder_without_text_raises(text_folder: Write, tmp_path: Path) -> None:
    config = text_folder(valid="x", test="\n")
    vocabulary = open_corpus(text_folder(name="sound")).vocabulary
    (tmp_path / "empty").mkdir()
    for folder, message in [(config.dir, r"test split .*test\.txt'"), ("empty", r"test\.txt"), ("nowhere", "nowhere")]:
        with pytest.raises(UserError, match=message):
            encode_folder(str(tmp_path / str(folder)), data_config=config, vocabulary=vocabulary)
