"""WikiText: read from archives in the published layout; published counts include a `</s>` for every line."""

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lm.data.corpora import wikitext
from lm.data.corpora.wikitext import WikiTextConfig, find_archive
from lm.data.corpus import open_corpus
from lm.data.source import SPLITS
from lm.system.errors import UserError
from tests.helpers.archives import sha256, write_folder, write_tar, write_zip
from tests.helpers.http_server import closed_port, serving

TEXTS = {
    "train": " \n = Valkyria = \n \n The <unk> of a game @-@ play , a\xa0b \n \n",
    "valid": " \n The game \n",
    "test": " other \n",
}
TOKENS = {
    "train": "</s> = Valkyria = </s> </s> The <unk> of a game @-@ play , a\xa0b </s> </s>",
    "valid": "</s> The game </s>",
    "test": "<unk> </s>",
}


def members(size: int, variant: str = "tokens") -> dict[str, str]:
    top = f"wikitext-{size}" + ("-raw" if variant == "raw" else "")
    return {f"{top}/wiki.{split}.{variant}": text for split, text in TEXTS.items()} | {f"{top}/README": "outside"}


def config_of(archive: Path, size: int = 2) -> WikiTextConfig:
    return WikiTextConfig(
        f"wikitext{size}", root=str(archive.parent / "root"), archive=str(archive), sha256=sha256(archive)
    )


@pytest.mark.parametrize("size", [2, 103])
@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_tokens_are_those_of_the_published_rule(tmp_path: Path, size: int, write) -> None:  # type: ignore[no-untyped-def]
    corpus = open_corpus(config_of(write(tmp_path / "mine", members(size)), size))
    assert {split: " ".join(corpus.vocabulary.decode(corpus.split(split))) for split in SPLITS} == TOKENS
    assert corpus.meta["vocabulary_size"] == len(set(TOKENS["train"].split(" ")))
    assert corpus.vocabulary.counts[corpus.vocabulary.unk_id] == 1
    assert [corpus.meta["splits"][split]["blank_lines"] for split in SPLITS] == [3, 1, 0]


def test_raw_variant_is_tokenized_by_our_rule(tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "mine.zip", members(2, "raw"))
    corpus = open_corpus(replace(config_of(archive), variant="raw"))
    words = corpus.vocabulary.decode(corpus.split("train"))
    assert words[:5] == ["</s>", "=", "Valkyria", "=", "</s>"]
    assert words[-9:] == [*"@-@", "play", ",", "a", "b", "</s>", "</s>"]
    assert "raw" in corpus.path.name


@pytest.mark.parametrize("size", [2, 103])
def test_other_text_needs_its_sha256(tmp_path: Path, size: int) -> None:
    archive = write_zip(tmp_path / "mine.zip", members(size))
    folder = write_folder(tmp_path / "folder", members(size))
    config = replace(config_of(archive, size), sha256=None)
    with pytest.raises(UserError, match=rf"wiki\.train\.tokens of .* the sha1 \w{{40}}; got .*={sha256(archive)}\."):
        open_corpus(config)
    with pytest.raises(UserError, match=r"wiki\.train\.tokens of .*Try data=text\."):
        open_corpus(replace(config, archive=str(folder)))


def test_zip_is_downloaded_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_zip(tmp_path / "mine.zip", members(2))
    other = write_zip(tmp_path / "other.zip", members(103))
    monkeypatch.setattr("lm.data.archive.PAUSE_S", 0.01)
    monkeypatch.setitem(wikitext.CHECKSUMS, "wikitext-2", (sha256(archive),))
    with serving(archive.read_bytes(), "cut 200", "cut 100") as server:
        corpus = open_corpus(WikiTextConfig(root=f"{tmp_path}/data", url=server.url))
        assert server.ranges == [None, "bytes=200-", "bytes=300-"]
    assert corpus.path.name == "wikitext2-min1"
    with (
        serving(other.read_bytes()) as server,
        pytest.raises(UserError, match=f"must have the sha256 {sha256(archive)}; got {sha256(other)}") as raised,
    ):
        open_corpus(WikiTextConfig(root=f"{tmp_path}/elsewhere", url=server.url))
    assert str(raised.value).count("must have") == 1


def test_parquet_rows_give_the_published_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parquet form has an empty row for each blank line. It is the last address, and only with pyarrow."""
    content = {}
    for split, text in TEXTS.items():
        rows = [line if line.strip() else "" for line in text.splitlines(keepends=True)]
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), file := io.BytesIO())
        name = "validation" if split == "valid" else split
        content[f"/wikitext-2-v1/{name}-00000-of-00001.parquet"] = file.getvalue()
    hashes = (hashlib.sha1(TEXTS[split].encode()).hexdigest() for split in SPLITS)
    monkeypatch.setitem(wikitext.CHECKSUMS, "wikitext-2", ("0" * 64, *hashes))
    monkeypatch.setattr(wikitext, "SITE", f"http://127.0.0.1:{closed_port()}")
    with serving(content) as server:
        monkeypatch.setattr(wikitext, "PARQUET_SITE", server.url.removesuffix("/file"))
        with monkeypatch.context() as patch, pytest.raises(UserError, match="Connection refused"):
            patch.setattr("lm.data.archive.find_spec", lambda _: None)
            open_corpus(WikiTextConfig(root=f"{tmp_path}/without"))
        corpus = open_corpus(WikiTextConfig(root=str(tmp_path)))
    assert " ".join(corpus.vocabulary.decode(corpus.split("train"))) == TOKENS["train"]
    assert {path.name for path in (tmp_path / "wikitext2").iterdir()} == {f"wiki.{split}.tokens" for split in SPLITS}


def test_published_archives_are_pinned() -> None:
    pins = {"2": "92675f1d", "2-raw": "ef7edb56", "103": "242ba0f2", "103-raw": "86f23751"}
    assert {top: sums[0][:8] for top, sums in wikitext.CHECKSUMS.items()} == {
        f"wikitext-{size}": checksum for size, checksum in pins.items()
    }
    assert find_archive("2", "raw").address == "https://wikitext.smerity.com/wikitext-2-raw-v1.zip"
