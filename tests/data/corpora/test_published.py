"""Text8, Europarl and One Billion Word, read from small archives generated in the published layouts."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lm.data.corpora import one_billion_word as one_billion_word_module
from lm.data.corpora import text8 as text8_module
from lm.data.corpora.europarl import find_archive
from lm.data.corpora.text8 import Text8Config
from lm.data.corpus import Corpus, open_corpus
from lm.data.source import SPLITS, ArchiveConfig
from lm.data.text.tokenize import SPACES, PieceJoiner, TokenRule
from lm.system.errors import UserError
from tests.helpers.archives import (
    EUROPARL,
    TEXT8,
    TOP,
    billion,
    europarl,
    one_billion_word,
    sha256,
    text8,
    write_folder,
    write_tar,
    write_zip,
)
from tests.helpers.http_server import serving


def texts(corpus: Corpus) -> dict[str, str]:
    return {split: " ".join(corpus.vocabulary.decode(corpus.split(split))) for split in SPLITS}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def digits(number: int) -> str:
    return " ".join(f"{number:03d}")


def sentences(corpus: Corpus, split: str) -> list[str]:
    """The split's sentences without spaces."""
    text = "".join(corpus.vocabulary.decode(corpus.split(split)))
    return [sentence for sentence in text.split("</s>") if sentence]


# ---- splits ------------------------------------------------------------------------------------------------------


def test_text8_splits_by_characters_and_ends_a_sentence_every_1000_words(tmp_path: Path) -> None:
    write_zip(tmp_path / "text8" / "text8.zip", {"text8": TEXT8, "../evil": "x", "readme": "x"})
    actual = texts(open_corpus(text8(tmp_path)))
    train, held_out = TEXT8[:5940].split(), TEXT8[5940:].split()
    assert len(train) == 1238
    assert (train[-1], held_out[0]) == ("g", "amma")  # the cut is inside a word
    expected = " ".join([*train[:1000], "</s>", *train[1000:], "</s>"])
    assert actual["train"] == expected.replace(" g ", " <unk> ")
    assert actual["valid"] == actual["test"] == " ".join(["<unk>", *held_out[1:], "</s>"])
    folder = f"text8-{sha256(tmp_path / 'text8' / 'text8.zip')[:8]}-min11"  # it is not the published file
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text8", folder]


def test_text8_keeps_words_seen_more_than_ten_times(tmp_path: Path) -> None:
    text = "ten " * 10 + "eleven " * 11 + "other " * 1000
    corpus = open_corpus(text8(tmp_path, write_zip(tmp_path / "t.zip", {"text8": text})))
    assert set(corpus.vocabulary.words) == {"eleven", "other", "<unk>", "</s>"}
    assert corpus.vocabulary.counts[corpus.vocabulary.unk_id] == 10 + 1  # and the word that the cut splits


def test_europarl_holds_out_the_99th_and_100th_of_each_hundred_files(tmp_path: Path) -> None:
    names = [f"txt/bg/ep-{number:03d}.txt" for number in range(310)]
    files = {name: f"<SPEAKER>\n{digits(number)}\n\n" for number, name in enumerate(names)}
    outside = {
        "txt/en/ep-001.txt": "outside",
        "other/txt/bg/ep-998.txt": "outside",
        "txt/bg/deeper/ep-999.txt": "outside",
        "txt/bg/notes.txt": "outside",
        "../txt/bg/ep-997.txt": "outside",
    }
    shuffled = {name: files[name] for name in random.Random(1).sample(names, len(names))}
    links = {"txt/bg/ep-996.txt": "/etc/passwd"}
    write_tar(tmp_path / "europarl" / "europarl.tgz", outside | shuffled, links=links)
    corpus = open_corpus(europarl(tmp_path))
    assert sentences(corpus, "valid") == ["098", "198", "298"]
    assert sentences(corpus, "test") == ["099", "199", "299"]
    train = [*range(98), *range(100, 198), *range(200, 298), *range(300, 310)]
    assert sentences(corpus, "train") == [f"{number:03d}" for number in train]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["europarl", "europarl-bg-min1"]


def test_europarl_tokens_are_lowercase_words_and_punctuation(tmp_path: Path) -> None:
    corpus = open_corpus(europarl(tmp_path, write_folder(tmp_path / "folder", EUROPARL), min_count=3))
    assert corpus.vocabulary.words == ("да", "</s>", ",", "<unk>")
    assert texts(corpus)["valid"] == "да , да <unk> </s> да </s> да , да <unk> </s> да </s>"


def test_europarl_aligned_holds_out_blocks_of_1000_lines(tmp_path: Path) -> None:
    lines = "".join(f"{digits(block)}\n" + "\n" * 998 + f"{digits(block)}\n" for block in range(250)) + digits(250)
    file = "europarl-v7.bg-en.bg"
    archive = write_tar(tmp_path / "bg-en.tgz", {file: lines, "europarl-v7.bg-en.en": "english\n"})
    folder = write_folder(tmp_path / "pair", {file: lines})
    config = replace(europarl(tmp_path, archive), release="aligned")
    corpus = open_corpus(config)
    assert sentences(corpus, "valid") == ["098", "098", "198", "198"]
    assert sentences(corpus, "test") == ["099", "099", "199", "199"]
    train = [*range(98), *range(100, 198), *range(200, 250)]
    assert sentences(corpus, "train") == [f"{number:03d}" for number in train for _ in range(2)] + ["250"]
    assert open_corpus(replace(config, archive=str(folder))).hashes() == corpus.hashes()


def test_one_billion_word_reads_the_shards_in_order(tmp_path: Path) -> None:
    write_tar(tmp_path / "one_billion_word" / f"{TOP}.tar.gz", billion())
    corpus = open_corpus(one_billion_word(tmp_path))
    actual = texts(corpus)
    assert actual["train"] == " ".join(f"The N{number} , the\xa0End . </s>" for number in range(1, 100))
    assert actual["test"] == "The <unk> </s>"
    assert actual["valid"] == "The N1 </s>"


# ---- archives and folders ----------------------------------------------------------------------------------------


def test_archive_folder_and_file_give_the_same_corpus(tmp_path: Path) -> None:
    for make, files, write in [
        (text8, {"text8": TEXT8}, write_zip),
        (europarl, EUROPARL, write_tar),
        (one_billion_word, billion(), write_tar),
    ]:
        name = make.__name__
        archive, folder = write(tmp_path / f"{name}.archive", files), write_folder(tmp_path / f"{name}-folder", files)
        write_folder(tmp_path / "root" / name, files)  # the corpus's own folder
        origins = [archive, folder, None, *(path for path in (folder / "text8", folder / TOP) if path.exists())]
        corpora = [open_corpus(make(tmp_path / "root", origin)) for origin in origins]
        assert all(texts(corpus) == texts(corpora[0]) for corpus in corpora)


def test_incomplete_corpus_names_what_is_missing(tmp_path: Path) -> None:
    few = write_tar(tmp_path / "e.tgz", dict(list(EUROPARL.items())[:99]))
    with pytest.raises(UserError, match=r"100 files txt/bg/ep-\*\.txt in .*; got 99"):
        open_corpus(europarl(tmp_path, few))
    write_folder(tmp_path, {"europarl-v7.bg-en.bg": "a\n" * 98_999})
    with pytest.raises(UserError, match="100 blocks of 1000 lines"):
        open_corpus(replace(europarl(tmp_path, tmp_path), release="aligned"))
    files = {name: text for name, text in billion().items() if "00042" not in name and "heldout-00001" not in name}
    with pytest.raises(UserError, match=r"lacks news\.en-00042-of-00100, news\.en\.heldout-00001-of-00050\."):
        open_corpus(one_billion_word(tmp_path, write_tar(tmp_path / "b.tar.gz", files)))
    with pytest.raises(UserError, match=r"news\.en-00005-of-00100 and 96 more\."):
        open_corpus(one_billion_word(tmp_path, write_tar(tmp_path / "c.tar.gz", {"x": "y"})))
    with pytest.raises(UserError, match="lacks text8"):
        open_corpus(text8(tmp_path, write_zip(tmp_path / "a.zip", {"other": TEXT8})))
    (tmp_path / "text8").write_bytes(b"")
    with pytest.raises(UserError, match="train split"):
        open_corpus(text8(tmp_path, tmp_path / "text8"))


@pytest.mark.parametrize(
    ("make", "file"), [(text8, "text8.zip"), (europarl, "europarl.tgz"), (one_billion_word, f"{TOP}.tar.gz")]
)
def test_without_network_the_error_says_what_to_fetch(tmp_path: Path, make, file: str) -> None:  # type: ignore[no-untyped-def]
    config: ArchiveConfig = make(tmp_path)
    with pytest.raises(UserError, match="Connection refused") as raised:
        open_corpus(config)
    for part in (str(tmp_path / config.name / file), config.url, "data.archive=PATH"):
        assert part in str(raised.value)
    with pytest.raises(UserError, match=r"data\.archive must name .*nowhere\\x1b'"):
        open_corpus(make(tmp_path, tmp_path / "nowhere\x1b"))


# ---- verification ------------------------------------------------------------------------------------------------


def test_published_archives_are_pinned() -> None:
    text8_archive, billion_archive = text8_module.ARCHIVE, one_billion_word_module.ARCHIVE
    assert text8_archive.address == "http://mattmahoney.net/dc/text8.zip"
    assert (text8_archive.size, str(text8_archive.checksum)[:8]) == (31_344_016, "a6640522")
    assert billion_archive.address == f"https://www.statmt.org/lm-benchmark/{TOP}.tar.gz"
    assert (billion_archive.size, str(billion_archive.checksum)[:8]) == (1_792_209_805, "01ba6038")
    archives = [find_archive("fi", aligned=aligned) for aligned in (False, True)]
    assert [archive.members for archive in archives] == [("txt/fi/ep-*.txt",), ("europarl-v7.fi-en.fi",)]
    files = ("europarl.tgz", "fi-en.tgz")
    assert [archive.address for archive in archives] == [f"https://www.statmt.org/europarl/v7/{name}" for name in files]


def test_archive_is_downloaded_once_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.data.archive.PAUSE_S", 0.01)
    archive, root = write_tar(tmp_path / "e.tgz", EUROPARL), tmp_path / "data"
    with serving(archive.read_bytes(), "503", "cut 500") as server:
        config = replace(europarl(root), url=server.url)
        corpus = open_corpus(config)
        first = contents(root)
        shutil.rmtree(corpus.path)
        open_corpus(config)
        assert contents(root) == first
        assert len(server.requests) == 3
    assert corpus.meta["archive"] == {
        "path": str(root / "europarl" / "europarl.tgz"),
        "url": server.url,
        "size": archive.stat().st_size,
        "sha256": sha256(archive),
    }
    assert [file.name for file in (root / "europarl").iterdir()] == ["europarl.tgz"]


def test_other_file_under_the_published_name_needs_its_sha256(tmp_path: Path) -> None:
    local = write_zip(tmp_path / "text8" / "text8.zip", {"text8": TEXT8})
    config = Text8Config(root=str(tmp_path))
    for wrong in (None, "0" * 64):
        with pytest.raises(UserError, match=f"must have the sha256 {wrong or 'a6640522'}.*data.sha256={sha256(local)}"):
            open_corpus(replace(config, sha256=wrong))
    corpus = open_corpus(replace(config, sha256=sha256(local)))
    assert corpus.path.name == f"text8-{sha256(local)[:8]}-min11"


def test_mirror_must_serve_the_published_file_or_the_one_named(tmp_path: Path) -> None:
    archive, root = write_zip(tmp_path / "mine.zip", {"text8": TEXT8}), tmp_path / "data"
    with serving(archive.read_bytes()) as server:
        config = Text8Config(root=str(root), url=server.url)
        with pytest.raises(UserError, match=r"must have 31,344,016 bytes"):
            open_corpus(config)
        corpus = open_corpus(replace(config, sha256=sha256(archive)))
    assert corpus.meta["archive"]["sha256"] == sha256(archive)


def test_given_archive_is_used_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = write_zip(tmp_path / "mine.zip", {"text8": TEXT8})
    config = text8(tmp_path / "data", archive)
    corpus = open_corpus(config)
    assert "mine.zip' is not the published text8.zip" in capsys.readouterr().out
    facts = {"path": str(archive), "size": archive.stat().st_size, "sha256": sha256(archive)}
    assert corpus.meta["archive"] == facts
    expected = f"must have the sha256 {'0' * 64}; got {sha256(archive)}. To use this file"  # not: download it again
    with pytest.raises(UserError, match=expected):
        open_corpus(replace(config, sha256="0" * 64))
    open_corpus(replace(config, sha256=sha256(archive)))
    assert "not the published" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"data\.sha256=null"):
        open_corpus(replace(config, archive=str(tmp_path), sha256="0" * 64))


# ---- subwords ----------------------------------------------------------------------------------------------------


def test_subword_pieces_spell_the_words_of_each_corpus(tmp_path: Path) -> None:
    configs: list[tuple[ArchiveConfig, int]] = [
        (text8(tmp_path, write_zip(tmp_path / "t.zip", {"text8": TEXT8})), 270),
        (europarl(tmp_path, write_tar(tmp_path / "e.tgz", EUROPARL)), 280),
        (one_billion_word(tmp_path, write_tar(tmp_path / "b.tar.gz", billion())), 290),
    ]
    for config, size in configs:
        words = open_corpus(replace(config, min_count=1))
        pieces = open_corpus(replace(config, min_count=1, tokenizer="sentencepiece", vocab_size=size))
        joiner = PieceJoiner(TokenRule(SPACES))
        spelled = "".join(map(joiner.add, pieces.vocabulary.decode(pieces.split("train"))))
        assert spelled.replace("</s>", " </s>") == texts(words)["train"]
