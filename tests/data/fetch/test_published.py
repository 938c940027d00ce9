"""Published corpora are found, fetched and verified; what is not the expected file is told and never used."""

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lm.data.corpora import europarl, one_billion_word, text8
from lm.data.corpora.europarl import EuroparlConfig, EuroparlRelease
from lm.data.corpora.text8 import Text8Config
from lm.data.corpus import Corpus
from lm.data.fetch.download import Patience
from lm.data.opening import open_corpus
from lm.system.errors import UserError
from tests.data.fetch.test_archives import EUROPARL, TEXT8, write_tar, write_zip
from tests.helpers.http_server import closed_port, serving


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def bulgarian(tmp_path: Path) -> EuroparlConfig:
    nowhere = f"http://127.0.0.1:{closed_port()}/europarl.tgz"
    return EuroparlConfig(
        "europarl", str(tmp_path / "data"), 1, url=nowhere, language="bg", release=EuroparlRelease.source
    )


@pytest.fixture
def wikipedia(tmp_path: Path) -> Text8Config:
    return Text8Config("text8", str(tmp_path / "data"), 11, url=f"http://127.0.0.1:{closed_port()}/text8.zip")


def test_the_published_files_are_the_publishers() -> None:
    assert text8.PUBLISHED.url == "http://mattmahoney.net/dc/text8.zip"
    assert (text8.PUBLISHED.size, text8.PUBLISHED.sha256[:8]) == (31_344_016, "a6640522")  # type: ignore[index]
    billion = one_billion_word.PUBLISHED
    assert billion.url.startswith("https://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13")
    assert (billion.size, billion.sha256[:8]) == (1_792_209_805, "01ba6038")  # type: ignore[index]
    for release, file, member in [
        (europarl.source_release, "europarl.tgz", "txt/fi/ep-*.txt"),
        (europarl.aligned_release, "fi-en.tgz", "europarl-v7.fi-en.fi"),
    ]:
        published = release("fi")
        assert (published.url, published.file) == (f"https://www.statmt.org/europarl/v7/{file}", file)
        assert published.patterns == (member,)


def test_a_corpus_is_fetched_once_and_recorded(
    tmp_path: Path, bulgarian: EuroparlConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.data.fetch.download.Patience", partial(Patience, pause=0.01))
    archive = write_tar(tmp_path / "e.tgz", EUROPARL)
    place = tmp_path / "data" / "europarl" / "europarl.tgz"
    with serving(archive.read_bytes(), "503", "cut 500") as server:
        config = replace(bulgarian, url=server.url)
        corpus = open_corpus(config)
        first = contents(tmp_path / "data")
        assert len(server.requests) == 3
        (corpus.path / "meta.json").unlink()
        for file in corpus.path.iterdir():
            file.unlink()
        corpus.path.rmdir()
        open_corpus(config)
        assert contents(tmp_path / "data") == first
        assert len(server.requests) == 3
    digest = sha256(archive)
    assert corpus.meta["archive"] == {
        "path": str(place),
        "url": server.url,
        "size": archive.stat().st_size,
        "sha256": digest,
    }
    assert set(corpus.meta["versions"]) == {"python", "numpy", "numba", "unicode"}
    assert Path(f"{place}.sha256").read_text() == f"{digest}  europarl.tgz\n"
    assert sorted(file.name for file in place.parent.iterdir()) == ["europarl.tgz", "europarl.tgz.sha256"]


def test_the_first_checksum_is_held_to(tmp_path: Path, bulgarian: EuroparlConfig) -> None:
    place = write_tar(tmp_path / "data" / "europarl" / "europarl.tgz", EUROPARL)
    open_corpus(bulgarian)
    first = sha256(place)
    write_tar(place, {name: text + "more\n" for name, text in EUROPARL.items()})
    with pytest.raises(UserError, match=f"must have the sha256 {first} that it had at first; it has {sha256(place)}"):
        open_corpus(replace(bulgarian, min_count=2))
    place.unlink()
    other = write_tar(tmp_path / "other.tgz", {"x": "y"}).read_bytes()
    with serving(other) as server, pytest.raises(UserError, match=f"must be the file with the sha256 {first}"):
        open_corpus(replace(bulgarian, min_count=2, url=server.url))
    Path(f"{place}.sha256").write_text("nonsense")
    with pytest.raises(UserError, match=r"europarl\.tgz\.sha256' must begin with a sha256"):
        open_corpus(replace(bulgarian, min_count=2))


def test_a_page_in_an_archives_place_is_told_and_not_written_down(tmp_path: Path, bulgarian: EuroparlConfig) -> None:
    with serving(b"<html>Please log in</html>") as server, pytest.raises(UserError, match="begins with b'<html>'"):
        open_corpus(replace(bulgarian, url=server.url))
    assert contents(tmp_path / "data") == {}


def test_another_file_in_the_published_ones_place_is_used_only_if_meant(tmp_path: Path, wikipedia: Text8Config) -> None:
    place = write_zip(tmp_path / "data" / "text8" / "text8.zip", {"text8": TEXT8})
    size = place.stat().st_size
    with pytest.raises(UserError, match=f"must be the published text8.zip of 31,344,016 bytes; it has {size}"):
        open_corpus(wikipedia)
    wrong = "0" * 64
    with pytest.raises(
        UserError, match=f"must have the sha256 {wrong}; it has {sha256(place)}.*sha256={sha256(place)}"
    ):
        open_corpus(replace(wikipedia, sha256=wrong))
    corpus = open_corpus(replace(wikipedia, url=None, sha256=sha256(place)))
    assert set(corpus.meta["archive"]) == {"path", "size", "sha256"}
    assert corpus.path.name == f"text8-min11-{sha256(place)[:8]}"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["text8", corpus.path.name]


def test_a_mirror_must_give_the_published_file_or_the_one_named(tmp_path: Path, wikipedia: Text8Config) -> None:
    archive = write_zip(tmp_path / "mine.zip", {"text8": TEXT8})
    with serving(archive.read_bytes()) as server:
        with pytest.raises(UserError, match=r"it offers \d+ bytes instead of 31,344,016"):
            open_corpus(replace(wikipedia, url=server.url))
        assert list((tmp_path / "data").iterdir()) == []
        corpus = open_corpus(replace(wikipedia, url=server.url, sha256=sha256(archive)))
    assert corpus.meta["archive"]["sha256"] == sha256(archive)


def test_a_given_archive_is_taken_as_it_is_and_noted(
    tmp_path: Path, wikipedia: Text8Config, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = write_zip(tmp_path / "mine.zip", {"text8": TEXT8})
    given = replace(wikipedia, archive=str(archive), url=None)
    corpus = open_corpus(given)
    assert "mine.zip' is not the published text8.zip; it is used as it is" in capsys.readouterr().out
    assert corpus.meta["archive"] == {
        "path": str(archive),
        "size": archive.stat().st_size,
        "sha256": sha256(archive),
    }
    root = str(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"must have the sha256 {'0' * 64}; it has {sha256(archive)}"):
        open_corpus(replace(given, root=root, sha256="0" * 64))
    open_corpus(replace(given, root=root, sha256=sha256(archive)))
    assert "not the published" not in capsys.readouterr().out
    with pytest.raises(UserError, match=f"data.sha256={'0' * 64} is not that of the archive from which"):
        open_corpus(replace(given, root=root, sha256="0" * 64))  # also now that it is prepared
    with pytest.raises(UserError, match=r"is a folder\. Leave data\.sha256 out"):
        open_corpus(replace(given, archive=str(tmp_path), root=root, sha256="0" * 64))


# ---- Europarl's aligned release ----------------------------------------------------------------------------------

NUMBERED = [number for number in range(150_500) if number % 97 == 0 or number % 1000 in (0, 999)]
LINES = [""] * 150_500
for numbered in NUMBERED:
    LINES[numbered] = f"Line {numbered}"
# Empty lines are no sentences, but they count.


def aligned(config: EuroparlConfig, archive: Path | None) -> EuroparlConfig:
    return replace(
        config, archive=archive and str(archive), url=None if archive else config.url, release=EuroparlRelease.aligned
    )


def lines_of(corpus: Corpus, split: str) -> int:
    return int((corpus.split(split) == corpus.vocabulary.eos_id).sum())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"europarl-v7.bg-en.bg": "\n".join(LINES) + "\n", "europarl-v7.bg-en.en": "outside\n" * 10}
    return write_tar(tmp_path_factory.mktemp("pair") / "bg-en.tgz", files)


def test_the_aligned_release_is_split_by_blocks_of_lines(bulgarian: EuroparlConfig, pair: Path) -> None:
    corpus = open_corpus(aligned(bulgarian, pair))
    expected = {
        "valid": [number for number in NUMBERED if number // 1000 % 100 == 98],
        "test": [number for number in NUMBERED if number // 1000 % 100 == 99],
        "train": [number for number in NUMBERED if number // 1000 % 100 < 98],
    }
    assert {split: lines_of(corpus, split) for split in expected} == {s: len(n) for s, n in expected.items()}
    words = corpus.vocabulary.decode(corpus.split("train"))
    assert [word for word in words if word.isdecimal()] == [str(number) for number in expected["train"]]
    assert corpus.path.name.startswith("europarl-bg-aligned-min1-")
    assert "blocks of 1000 lines" in corpus.meta["rule"]["splits"]
    assert "outside" not in corpus.vocabulary.words


def test_the_aligned_release_is_fetched_or_read_from_its_folder(
    tmp_path: Path, bulgarian: EuroparlConfig, pair: Path
) -> None:
    with serving(pair.read_bytes()) as server:
        fetched = open_corpus(aligned(replace(bulgarian, url=server.url), None))
    assert fetched.path.name == "europarl-bg-aligned-min1"
    assert (tmp_path / "data" / "europarl" / "bg-en.tgz").exists()
    (tmp_path / "europarl-v7.bg-en.bg").write_text("\n".join(LINES))
    from_folder = open_corpus(aligned(bulgarian, tmp_path))
    assert fetched.hashes() == from_folder.hashes()


@pytest.mark.parametrize("lines", [0, 98_999])
def test_an_aligned_file_that_is_too_short_is_told(tmp_path: Path, bulgarian: EuroparlConfig, lines: int) -> None:
    (tmp_path / "europarl-v7.bg-en.bg").write_text("a\n" * lines)
    with pytest.raises(UserError, match=r"at least 100 blocks of 1000 lines europarl-v7\.bg-en\.bg in "):
        open_corpus(aligned(bulgarian, tmp_path))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"language": "xx"}, "must be one of bg cs da de el en es et fi fr hu it lt lv nl pl pt ro sk sl sv"),
        ({"language": "en", "release": EuroparlRelease.aligned}, "has no English of its own"),
        ({"url": "ftp://host/x"}, "data.url must begin with http:// or https://; got 'ftp://host/x'"),
        ({"url": "http://host:no/x"}, "data.url must begin with"),
        ({"url": "http:///x"}, "data.url must begin with"),
        ({"url": "http://host/a b"}, "data.url must begin with"),
        ({"archive": "x"}, "data.url and data.archive exclude each other"),
        ({"sha256": "ABC"}, "data.sha256 must be 64 digits of 0-9 and a-f"),
    ],
)
def test_unsound_settings_are_told(bulgarian: EuroparlConfig, change: dict[str, object], expected: str) -> None:
    assert list(bulgarian.problems()) == []
    problems = list(replace(bulgarian, **change).problems())  # type: ignore[arg-type]
    assert len(problems) == 1
    assert expected in problems[0]
