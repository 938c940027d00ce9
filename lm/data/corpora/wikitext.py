"""WikiText-2 and WikiText-103: articles of the English Wikipedia, already tokenized, with `<unk>` for rare words.

Published perplexities count `</s>` after every line, blank lines included, and the vocabulary is all words of the
training text. The raw variants contain every word as written and need a token rule and `data.min_count`.
"""

from dataclasses import dataclass, field
from typing import Literal

from lm.config.groups import plugin
from lm.data.archive import Archive, Mirror, archive_source
from lm.data.source import SPLITS, ArchiveConfig, Source
from lm.data.text.tokenize import SPACES, WORD_PATTERN, TokenRule

SITE = "https://wikitext.smerity.com"
PARQUET_SITE = "https://huggingface.co/datasets/Salesforce/wikitext/resolve/main"


@dataclass
class WikiTextConfig(ArchiveConfig):
    """WikiText-2 (2 M tokens of good Wikipedia articles, 33k words) and WikiText-103 (103 M tokens, 268k words)."""

    name: str = "wikitext2"
    variant: Literal["tokens", "raw"] = field(default="tokens", kw_only=True)
    """tokens: split on spaces, rare words are <unk>, as in published results; raw: every word as written."""

    @property
    def token_rule(self) -> TokenRule:
        return TokenRule(WORD_PATTERN if self.variant == "raw" else SPACES, keep_blank_lines=True)


@plugin("data", "wikitext2", WikiTextConfig)
@plugin("data", "wikitext103", WikiTextConfig)
def source(config: WikiTextConfig) -> Source:
    size = config.name.removeprefix("wikitext")
    is_raw = config.variant == "raw"
    return archive_source(
        config,
        find_archive(size, config.variant),
        lambda files: {split: [files[f"wiki.{split}.{config.variant}"]] for split in SPLITS},
        folder=f"{config.name}-raw" if is_raw else config.name,
        source=f"WikiText-{size}{', raw' if is_raw else ''}",
        sentences="lines, including blank ones",
    )


def find_archive(size: str, variant: str) -> Archive:
    """Return the archive of WikiText-`size`."""
    top = f"wikitext-{size}-raw" if variant == "raw" else f"wikitext-{size}"
    checksum, *files = CHECKSUMS[top]
    names = tuple(f"wiki.{split}.{variant}" for split in SPLITS)
    return Archive(
        f"{top}-v1.zip",
        (f"{SITE}/{top}-v1.zip", *([parquet_mirror(size)] if variant == "tokens" else [])),
        members=(*names, *(f"{top}/{name}" for name in names)),  # data.archive may be the top folder
        checksum=checksum,
        required=names,
        checksums=dict(zip(names, files, strict=False)),
    )


def parquet_mirror(size: str) -> Mirror:
    """Return the addresses of WikiText-`size` as .parquet parts, one for each file except the large one."""

    def parts(split: str) -> tuple[str, ...]:
        count = 2 if (size, split) == ("103", "train") else 1
        names = [f"{split}-{number:05d}-of-{count:05d}.parquet" for number in range(count)]
        return tuple(f"{PARQUET_SITE}/wikitext-{size}-v1/{name}" for name in names)

    return {f"wiki.{split}.tokens": parts("validation" if split == "valid" else split) for split in SPLITS}


CHECKSUMS = {
    "wikitext-2": (
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        "863f29c46ef9d167fff4940ec821195882fe29d1",
        "0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422",
        "c7b8ce0aa086fb34dab808c5c49224211eb2b172",
    ),
    "wikitext-2-raw": ("ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",),
    "wikitext-103": (
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        "b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
    ),
    "wikitext-103-raw": ("86f2375181b9247049d9c9205fad2b71b274b568",),
}
"""Published checksums: of the archive, then of the train, valid and test files as far as known."""
