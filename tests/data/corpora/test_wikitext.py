"""WikiText: read from archives in the published layout; published counts include a `</s>` for every line."""

from dataclasses import replace
from pathlib import Path

import pytest

from lm.config.registry import find_plugin
from lm.data.corpora.wikitext import Variant, WikiText2Config
from lm.data.prepare import open_corpus
from lm.data.source import SPLITS
from lm.system.errors import UserError
from tests.helpers.archives import sha256, write_folder, write_tar, write_zip

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


def config_of(archive: Path, size: int = 2) -> WikiText2Config:
    settings: type[WikiText2Config] = find_plugin("data", f"wikitext{size}").settings
    return settings(root=str(archive.parent / "root"), archive=str(archive), sha256=sha256(archive))


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
    corpus = open_corpus(replace(config_of(archive), variant=Variant.raw))
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
