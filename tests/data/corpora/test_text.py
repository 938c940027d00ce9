"""The user's own text: found again without reading it, and every mistake told."""

import gzip
import itertools
import lzma
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
from lm.data.prepare import encode_folder, open_corpus
from lm.data.source import SPLITS
from lm.data.text.vocabulary import EOS, UNK
from lm.system.errors import UserError

Write = Callable[..., TextConfig]

TEXTS = st.text(st.sampled_from("abé \t\r\n\u2028\x85"), max_size=60).map(lambda text: text + "\nword word word\n")


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


def test_prepared_once(text_folder: Write, capsys: pytest.CaptureFixture[str]) -> None:
    config = text_folder()
    first = open_corpus(config)
    again = open_corpus(config)
    assert again.path == first.path
    assert capsys.readouterr().out.count("preparing ") == 1


def test_changed_text_or_rule_is_another_corpus(text_folder: Write) -> None:
    config = text_folder()
    changes: list[dict[str, Any]] = [{}, {"lowercase": True}, {"min_count": 1}, {"max_words": 1}]
    paths = [open_corpus(replace(config, **change)).path for change in changes]
    paths.append(open_corpus(text_folder(test="b z z\n")).path)
    assert len(set(paths)) == 5


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


def test_folder_names_become_safe(text_folder: Write) -> None:
    path = open_corpus(text_folder(name="my texts\x1b[31m é=1,2")).path
    assert path.name.startswith("text-my_texts_31m_1_2-")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": ""}, r"valid split .*valid\.txt'"),
        ({"train": " \n\t\n"}, r"train split .*train\.txt'"),
        ({"train": "a b\n"}, r"data\.min_count=1"),
        ({"test": b"ok\nab\xffc\n"}, r"test\.txt' must be UTF-8 text; got byte 0xff at offset 5"),
    ],
)
def test_bad_text_is_told_and_nothing_is_left(text_folder: Write, change: dict[str, str], message: str) -> None:
    config = text_folder(**change)
    with pytest.raises(UserError, match=message):
        open_corpus(config)
    assert [path.name for path in Path(config.root).iterdir()] == []


def test_wrong_bytes_are_replaced_where_asked(text_folder: Write) -> None:
    corpus = open_corpus(text_folder(train=b"a\xff a\xff\n", errors="replace"))
    assert corpus.vocabulary.decode(corpus.split("train")) == ["a\ufffd", "a\ufffd", EOS]
    assert corpus.path != open_corpus(text_folder(train=b"a\xff a\xff\n", name="other", errors="replace")).path


SPLIT_TEXTS = {"train": "a b a\nb c\n", "valid": "a c\n", "test": "b z\n"}


def write_form(folder: Path, split: str, form: str) -> None:
    """A split's text in one of the forms that data.dir may hold."""
    text = SPLIT_TEXTS[split].encode()
    first, second = text[:2], text[2:]  # cut inside a line, which a file's end ends
    match form:
        case ".txt":
            (folder / f"{split}.txt").write_bytes(text)
        case ".txt.gz":
            (folder / f"{split}.txt.gz").write_bytes(gzip.compress(text))
        case ".txt.xz":
            (folder / f"{split}.txt.xz").write_bytes(lzma.compress(text))
        case ".zip":
            with zipfile.ZipFile(folder / f"{split}.zip", "w") as archive:
                for name, data in [("b.txt", second), ("a.txt", first), ("readme.md", b"x")]:
                    archive.writestr(name, data)
        case "folder":
            (folder / split).mkdir()
            (folder / split / "2.txt.gz").write_bytes(gzip.compress(second))
            (folder / split / "1.txt").write_bytes(first)
            (folder / split / ".hidden").write_bytes(b"x")


FORMS = [".txt", ".txt.gz", ".txt.xz", ".zip", "folder"]


@pytest.mark.parametrize("form", FORMS)
def test_a_split_may_have_any_form(tmp_path: Path, form: str) -> None:
    for split in SPLITS:
        write_form(tmp_path, split, form if split == "train" else ".txt")
    corpus = open_corpus(TextConfig("text", str(tmp_path / "root"), 1, dir=str(tmp_path), lowercase=False))
    found = {split: " ".join(corpus.vocabulary.decode(corpus.split(split))) for split in SPLITS}
    cut = "a </s> b a" if form in (".zip", "folder") else "a b a"
    assert found == {"train": f"{cut} </s> b c </s>", "valid": "a c </s>", "test": "b <unk> </s>"}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(FORMS, 2)])
def test_two_forms_of_a_split_are_refused(tmp_path: Path, one: str, other: str) -> None:
    for split in SPLITS:
        write_form(tmp_path, split, ".txt.gz")
    (tmp_path / "valid.txt.gz").unlink()
    write_form(tmp_path, "valid", one)
    write_form(tmp_path, "valid", other)
    with pytest.raises(UserError, match=r"one form of each split; '.*' has valid.* and valid.*data\.valid=PATTERN"):
        open_corpus(TextConfig("text", str(tmp_path / "root"), 1, dir=str(tmp_path), lowercase=False))


def test_patterns_name_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "news/2.txt": "c\n",
        "news/1.txt": "b\n",
        "news/old/3.text": "a",
        "v": "b",
        "t.txt": "c",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    patterns = {"train": "news/**/*.t*xt", "valid": "v", "test": str(tmp_path / "[t]*")}
    corpus = open_corpus(TextConfig("text", "root", 1, dir=None, lowercase=False, **patterns))
    assert corpus.vocabulary.decode(corpus.split("train")) == ["b", EOS, "c", EOS, "a", EOS]
    assert corpus.vocabulary.decode([*corpus.split("valid"), *corpus.split("test")]) == ["b", EOS, "c", EOS]
    assert corpus.meta["files"]["train"] == [str(tmp_path / "news" / name) for name in ("1.txt", "2.txt", "old/3.text")]
    with pytest.raises(UserError, match=r"data\.test must be .* pattern .*nothing matches 'x\*' in "):
        open_corpus(TextConfig("text", "root", 1, dir=None, lowercase=False, **patterns | {"test": "x*"}))
    with pytest.raises(UserError, match=r"data\.train and data\.valid must name different files.*1\.txt'"):
        open_corpus(TextConfig("text", "root", 1, dir=None, lowercase=False, **patterns | {"valid": "news/1*"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "train").mkdir(), r"train' must "),
        (lambda folder: write_strange(folder / "train"), r"train' must .*'x\.md'"),
        (lambda folder: (folder / "train.txt.gz").write_bytes(b"\x1f\x8bnonsense"), r"train\.txt\.gz'"),
        (lambda folder: (folder / "train.txt.xz").write_bytes(lzma.compress(b"a\n")[:-9]), r"train\.txt\.xz'"),
        (lambda folder: (folder / "train.zip").write_bytes(b"nonsense"), r"train\.zip'"),
        (lambda folder: zipfile.ZipFile(folder / "train.zip", "w").close(), r"train\.zip' must contain \.txt files"),
    ],
)
def test_damaged_and_strange_files_are_told(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    for split in ("valid", "test"):
        write_form(tmp_path, split, ".txt")
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        open_corpus(TextConfig("text", str(tmp_path / "root"), 1, dir=str(tmp_path), lowercase=False))
    assert [path.name for path in (tmp_path / "root").glob("*")] == []


def write_strange(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "x.md").write_text("x")


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
        open_corpus(TextConfig("text", str(tmp_path), 2, dir=str(tmp_path / name), lowercase=False))


def test_no_folder_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.dir must name a folder.*got None"):
        open_corpus(TextConfig("text", str(tmp_path), 2, dir=None, lowercase=False))


def test_another_folder_is_read_by_the_runs_own_rule(text_folder: Write) -> None:
    corpus = open_corpus(text_folder(lowercase=True))
    other = text_folder(name="other", train="A q\n\nB <unk> </s>\n", valid="a\n", test="b")
    folded = replace(other, lowercase=True)
    encoded = encode_folder(str(other.dir), data_config=folded, vocabulary=corpus.vocabulary)
    texts = {split: " ".join(corpus.vocabulary.decode(text.tokens)) for split, text in encoded.items()}
    assert texts == {"train": "a <unk> </s> b <unk> </s> </s>", "valid": "a </s>", "test": "b </s>"}
    (Path(str(other.dir)) / "train.txt").unlink()
    cased = encode_folder(str(other.dir), data_config=other, vocabulary=corpus.vocabulary)
    assert list(cased) == ["valid", "test"]
    sizes = [(len(text.tokens), text.num_words, text.num_characters) for text in encoded.values()]
    assert sizes == [(7, 7, 18), (2, 2, 2), (2, 2, 1)]
    assert cased["test"].tokens.dtype == corpus.split("test").dtype


def test_another_folder_without_text_is_told(text_folder: Write, tmp_path: Path) -> None:
    config = text_folder(valid="x", test="\n")
    vocabulary = open_corpus(text_folder(name="sound")).vocabulary
    with pytest.raises(UserError, match=r"test split .*test\.txt'"):
        encode_folder(str(config.dir), data_config=config, vocabulary=vocabulary)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.dir"):
        encode_folder(str(tmp_path / "empty"), data_config=config, vocabulary=vocabulary)
    with pytest.raises(UserError, match="does not exist"):
        encode_folder(str(tmp_path / "nowhere"), data_config=config, vocabulary=vocabulary)
