"""Published corpora, read from small archives generated in the published layout."""

import hashlib
import io
import os
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lm.data.corpora.europarl import EuroparlConfig, EuroparlRelease
from lm.data.corpora.one_billion_word import OneBillionWordConfig, ShardOrder
from lm.data.corpora.text8 import Text8Config
from lm.data.corpus import SPLITS, Corpus
from lm.data.opening import open_corpus
from lm.data.settings import ArchiveConfig, Tokenizer
from lm.data.text.detokenize import PieceJoiner
from lm.data.text.subwords import WORD_END
from lm.data.text.tokenize import SPACES, TokenRule
from lm.system.errors import UserError
from tests.helpers.http_server import closed_port

TOP = "1-billion-word-language-modeling-benchmark-r13output"


def texts(corpus: Corpus) -> dict[str, str]:
    return {split: " ".join(corpus.vocabulary.decode(corpus.split(split))) for split in SPLITS}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def origin(place: Path, archive: Path | None) -> tuple[str | None, str | None, str | None]:
    """archive, url and sha256: a given archive, or the one in its place; where there is none, nobody serves it."""
    if archive is not None:
        return str(archive), None, None
    return None, f"http://127.0.0.1:{closed_port()}/{place.name}", sha256(place) if place.exists() else None


def write_folder(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_tar(path: Path, files: dict[str, str], *, links: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return path


# ---- Text8 -------------------------------------------------------------------------------------------------------

# 24 bytes a time: 250 times are 6000 bytes, of which the last 60 are validation and test.
TEXT8 = "alpha beta gamma a beta " * 250


def text8(root: Path, archive: Path | None = None) -> Text8Config:
    return Text8Config("text8", str(root), 11, *origin(root / "text8" / "text8.zip", archive))


def write_zip(path: Path, members: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def test_text8_splits_by_characters_and_ends_a_sentence_every_1000_words(tmp_path: Path) -> None:
    write_zip(tmp_path / "text8" / "text8.zip", {"text8": TEXT8, "../evil": "x", "readme": "x"})
    found = texts(open_corpus(text8(tmp_path)))
    train, held_out = TEXT8[:5940].split(), TEXT8[5940:].split()
    assert len(train) == 1238
    assert (train[-1], held_out[0]) == ("g", "amma")  # the cut falls inside a word
    expected = " ".join([*train[:1000], "</s>", *train[1000:], "</s>"])
    assert found["train"] == expected.replace(" g ", " <unk> ")
    assert found["valid"] == found["test"] == " ".join(["<unk>", *held_out[1:], "</s>"])
    folder = f"text8-min11-{sha256(tmp_path / 'text8' / 'text8.zip')[:8]}"  # it is not the published file
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text8", folder]


def test_text8_from_zip_folder_and_file_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "unpacked").mkdir()
    (tmp_path / "unpacked" / "text8").write_text(TEXT8)
    archives = [
        write_zip(tmp_path / "t.zip", {"text8": TEXT8}),
        tmp_path / "unpacked",
        tmp_path / "unpacked" / "text8",
    ]
    corpora = [open_corpus(text8(tmp_path / f"root{number}", archive)) for number, archive in enumerate(archives)]
    (tmp_path / "root" / "text8").mkdir(parents=True)
    (tmp_path / "root" / "text8" / "text8").write_text(TEXT8)
    corpora.append(open_corpus(text8(tmp_path / "root")))
    assert all(texts(corpus) == texts(corpora[0]) for corpus in corpora)


def test_text8_keeps_words_seen_more_than_ten_times(tmp_path: Path) -> None:
    text = "ten " * 10 + "eleven " * 11 + "other " * 1000
    corpus = open_corpus(text8(tmp_path, write_zip(tmp_path / "t.zip", {"text8": text})))
    assert set(corpus.vocabulary.words) == {"eleven", "other", "<unk>", "</s>"}
    assert corpus.vocabulary.counts[corpus.vocabulary.unk_id] == 10 + 1  # and the word that the cut leaves a part of


def test_another_archive_is_another_corpus(tmp_path: Path) -> None:
    one = open_corpus(text8(tmp_path, write_zip(tmp_path / "one.zip", {"text8": TEXT8})))
    two = open_corpus(text8(tmp_path, write_zip(tmp_path / "two.zip", {"text8": TEXT8.replace("a", "b")})))
    assert one.path != two.path
    assert open_corpus(text8(tmp_path, tmp_path / "one.zip")).path == one.path
    os.utime(tmp_path / "one.zip", (1, 1))
    assert open_corpus(text8(tmp_path, tmp_path / "one.zip")).path != one.path


def test_a_prepared_corpus_outlives_its_archive(tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "text8" / "text8.zip", {"text8": TEXT8})
    config = text8(tmp_path)
    before = texts(open_corpus(config))
    archive.unlink()
    assert texts(open_corpus(config)) == before


def test_wrong_text8_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must hold one plain member text8; it holds 0"):
        open_corpus(text8(tmp_path, write_zip(tmp_path / "a.zip", {"other": TEXT8})))
    (tmp_path / "b").write_bytes(b"abc " * 50 + b"d\xc3\xa9 " + b"abc " * 50)
    with pytest.raises(UserError, match="a-z and spaces; byte 0xc3 at offset 201 is not"):
        open_corpus(text8(tmp_path, tmp_path / "b"))
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(UserError, match="the train split must hold at least one word"):
        open_corpus(text8(tmp_path, tmp_path / "c"))
    damaged = write_zip(tmp_path / "d.zip", {"text8": TEXT8})
    data = bytearray(damaged.read_bytes())
    data[45] ^= 0xFF
    damaged.write_bytes(data)
    with pytest.raises(UserError, match=r"d\.zip' must be a whole archive"):
        open_corpus(text8(tmp_path, damaged))


# ---- Europarl ----------------------------------------------------------------------------------------------------

EUROPARL = {
    f"txt/bg/ep-{number:03d}.txt": f"<CHAPTER ID={number}>\nДа, Да {number:03d}\n\n<P>\nда\n" for number in range(250)
}
OUTSIDE = {
    "txt/en/ep-001.txt": "english english english",
    "other/txt/bg/ep-998.txt": "outside outside outside",
    "txt/bg/deeper/ep-999.txt": "outside outside outside",
    "txt/bg/notes.txt": "outside outside outside",
    "../txt/bg/ep-997.txt": "outside outside outside",
}


def europarl(root: Path, archive: Path | None = None, *, min_count: int = 1) -> EuroparlConfig:
    given, url, _ = origin(root / "europarl" / "europarl.tgz", archive)
    return EuroparlConfig("europarl", str(root), min_count, given, url, language="bg", release=EuroparlRelease.source)


def expected_europarl(numbers: list[int]) -> str:
    return " ".join(f"да , да {number:03d} </s> да </s>" for number in numbers)


def test_europarl_takes_the_99th_and_100th_of_each_hundred_files(tmp_path: Path) -> None:
    shuffled = dict(sorted(EUROPARL.items(), key=lambda item: item[0][::-1]))
    links = {"txt/bg/ep-996.txt": "/etc/passwd"}
    write_tar(tmp_path / "europarl" / "europarl.tgz", OUTSIDE | shuffled, links=links)
    corpus = open_corpus(europarl(tmp_path))
    found = texts(corpus)
    held_out = [98, 99, 198, 199]
    assert found["train"] == expected_europarl([number for number in range(250) if number not in held_out])
    unknown = [found["valid"].split(), found["test"].split()]
    assert [text.count("<unk>") for text in unknown] == [2, 2]  # their numbers stand nowhere else
    assert len(unknown[0]) == len(expected_europarl([98, 198]).split())
    assert not any("outside" in word or "english" in word for word in corpus.vocabulary.words)
    assert corpus.path.name == "europarl-bg-min1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["europarl", "europarl-bg-min1"]


def test_europarl_from_archive_and_from_folder_is_the_same(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "e.tgz", OUTSIDE | EUROPARL)
    folder = write_folder(tmp_path / "folder", EUROPARL | {"txt/bg/notes.txt": "outside"})
    write_folder(tmp_path / "root" / "europarl", EUROPARL)
    corpora = [open_corpus(europarl(tmp_path / "root", path, min_count=3)) for path in (archive, folder, None)]
    assert texts(corpora[0]) == texts(corpora[1]) == texts(corpora[2])
    assert corpora[0].vocabulary.words == ("да", "</s>", ",", "<unk>")
    assert len({corpus.path for corpus in corpora}) == 3


def test_europarl_with_too_few_files_is_told(tmp_path: Path) -> None:
    few = dict(list(EUROPARL.items())[:99])
    with pytest.raises(UserError, match=r"needs at least 100 files txt/bg/ep-\*\.txt in .*; got 99"):
        open_corpus(europarl(tmp_path, write_tar(tmp_path / "e.tgz", few)))
    corpus = open_corpus(europarl(tmp_path, write_tar(tmp_path / "f.tgz", dict(list(EUROPARL.items())[:100]))))
    assert len(corpus.split("valid")) == len(corpus.split("test")) == 7


def test_wrong_bytes_in_a_member_are_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", EUROPARL)
    (folder / "txt/bg/ep-007.txt").write_bytes(b"abc \xff")
    with pytest.raises(UserError, match=r"ep-007\.txt' must be UTF-8 text; byte 0xff at offset 4"):
        open_corpus(europarl(tmp_path, folder))


@pytest.mark.parametrize("keep", [0, 10, 300, -20])
def test_a_truncated_archive_is_told_and_nothing_is_left(tmp_path: Path, keep: int) -> None:
    archive = write_tar(tmp_path / "e.tgz", EUROPARL)
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"e\.tgz' must be a whole archive or compressed file"):
        open_corpus(europarl(tmp_path / "root", archive))
    assert list((tmp_path / "root").iterdir()) == []


def test_an_archive_of_another_kind_is_told(tmp_path: Path) -> None:
    (tmp_path / "e.tgz").write_text("<html>404</html>" * 100)
    with pytest.raises(UserError, match=r"e\.tgz' must be a whole archive or compressed file"):
        open_corpus(europarl(tmp_path / "root", tmp_path / "e.tgz"))


# ---- One Billion Word --------------------------------------------------------------------------------------------


def billion() -> dict[str, str]:
    train_folder, held_out_folder = (f"{TOP}/{kind}-monolingual.tokenized.shuffled" for kind in ("training", "heldout"))
    training = {
        f"{train_folder}/news.en-{number:05d}-of-00100": f"The N{number} , the\xa0End .\n\n" for number in range(1, 100)
    }
    held_out = {f"{held_out_folder}/news.en.heldout-{number:05d}-of-00050": f"The N{number}\n" for number in range(50)}
    outside = {
        f"{TOP}/README": "outside",
        f"{train_folder}/news.en-00000-of-00100": "outside\n",
        f"{train_folder}/news.en-00001-of-00100.bak": "outside\n",
    }
    return held_out | dict(reversed(training.items())) | outside


def one_billion_word(root: Path, archive: Path | None = None) -> OneBillionWordConfig:
    given = origin(root / "one_billion_word" / f"{TOP}.tar.gz", archive)
    return OneBillionWordConfig("one_billion_word", str(root), 1, *given, shard_order=ShardOrder.fixed)


def test_one_billion_word_reads_the_shards_in_order(tmp_path: Path) -> None:
    write_tar(tmp_path / "one_billion_word" / f"{TOP}.tar.gz", billion())
    corpus = open_corpus(one_billion_word(tmp_path))
    found = texts(corpus)
    assert found["train"] == " ".join(f"The N{number} , the\xa0End . </s>" for number in range(1, 100))
    assert found["test"] == "The <unk> </s>"
    assert found["valid"] == "The N1 </s>"
    assert corpus.shard_ends("train") == [6 * number for number in range(1, 100)]
    with pytest.raises(UserError, match=r"meta\.json does not say where the shards of valid\.bin end"):
        corpus.shard_ends("valid")


def test_one_billion_word_from_archive_and_from_folders_is_the_same(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "b.tar.gz", billion())
    outer = write_folder(tmp_path / "outer", billion())
    write_folder(tmp_path / "root" / "one_billion_word", billion())
    corpora = [open_corpus(one_billion_word(tmp_path / "root", path)) for path in (archive, outer, outer / TOP, None)]
    assert all(texts(corpus) == texts(corpora[0]) for corpus in corpora)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    files = {name: text for name, text in billion().items() if "00042" not in name and "heldout-00001" not in name}
    with pytest.raises(UserError, match=r"lacks news\.en-00042-of-00100, news\.en\.heldout-00001-of-00050\. Download"):
        open_corpus(one_billion_word(tmp_path, write_tar(tmp_path / "b.tar.gz", files)))
    with pytest.raises(UserError, match=r"news\.en-00005-of-00100 and 96 more\. Download"):
        open_corpus(one_billion_word(tmp_path, write_tar(tmp_path / "c.tar.gz", {"x": "y"})))


# ---- all ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "file"), [(text8, "text8.zip"), (europarl, "europarl.tgz"), (one_billion_word, f"{TOP}.tar.gz")]
)
def test_without_a_network_it_is_told_what_to_fetch_and_where_to_put_it(tmp_path: Path, make, file: str) -> None:  # type: ignore[no-untyped-def]
    config: ArchiveConfig = make(tmp_path)
    with pytest.raises(UserError, match="Connection refused") as raised:
        open_corpus(config)
    for part in (str(tmp_path / config.name / file), config.url, "data.archive=PATH"):
        assert part in str(raised.value)
    with pytest.raises(UserError, match=r"data\.archive must name .*nowhere\\x1b', which does not exist"):
        open_corpus(make(tmp_path, tmp_path / "nowhere\x1b"))
    assert list(tmp_path.iterdir()) == []


# ---- in pieces -----------------------------------------------------------------------------------------------------


def test_each_corpus_can_be_cut_into_pieces_of_its_own_words(tmp_path: Path) -> None:
    configs: list[tuple[ArchiveConfig, int]] = [
        (text8(tmp_path, write_zip(tmp_path / "t.zip", {"text8": TEXT8})), 270),
        (europarl(tmp_path, write_tar(tmp_path / "e.tgz", EUROPARL)), 280),
        (one_billion_word(tmp_path, write_tar(tmp_path / "b.tar.gz", billion())), 290),
    ]
    for config, size in configs:
        words = open_corpus(replace(config, min_count=1))
        pieces = open_corpus(replace(config, min_count=1, tokenizer=Tokenizer.sentencepiece, vocab_size=size))
        joiner = PieceJoiner(TokenRule(SPACES))
        found = "".join(map(joiner.add, pieces.vocabulary.decode(pieces.split("train"))))
        assert found.replace("</s>", " </s>") == texts(words)["train"]
        ends = pieces.text("train").marks & WORD_END
        assert [int((ends[:end] > 0).sum()) for end in pieces.meta["splits"]["train"].get("shard_ends", [])] == (
            words.meta["splits"]["train"].get("shard_ends", [])
        )
