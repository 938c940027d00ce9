"""One Billion Word: shuffled English news sentences, already tokenized, case kept, in 99 training shards.

Test is held-out shard 0 and validation shard 1. The shards form one stream in their published order.
"""

from dataclasses import dataclass

from lm.config.groups import Count, plugin
from lm.data.archive import Archive, archive_source
from lm.data.source import ArchiveConfig, Source
from lm.data.text.tokenize import SPACES, TokenRule

TOP = "1-billion-word-language-modeling-benchmark-r13output"
_LAYOUT = (
    "training-monolingual.tokenized.shuffled/news.en-000[0-9][0-9]-of-00100",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-0000[01]-of-00050",
)
SHARDS = {
    "train": [f"news.en-{number:05d}-of-00100" for number in range(1, 100)],
    "valid": ["news.en.heldout-00001-of-00050"],
    "test": ["news.en.heldout-00000-of-00050"],
}
ARCHIVE = Archive(
    f"{TOP}.tar.gz",
    (f"https://www.statmt.org/lm-benchmark/{TOP}.tar.gz",),
    members=(*_LAYOUT, *(f"{TOP}/{pattern}" for pattern in _LAYOUT)),  # data.archive may be the top folder
    size=1_792_209_805,
    checksum="01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
    required=tuple(name for names in SHARDS.values() for name in names),
)


@dataclass
class OneBillionWordConfig(ArchiveConfig):
    """One Billion Word: shuffled English news sentences, already tokenized."""

    name: str = "one_billion_word"
    min_count: Count = 3

    token_rule = TokenRule(SPACES)


@plugin("data", "one_billion_word", OneBillionWordConfig)
def source(config: OneBillionWordConfig) -> Source:
    return archive_source(
        config,
        ARCHIVE,
        lambda files: {split: [files[name] for name in names] for split, names in SHARDS.items()},
        folder="one_billion_word",
        source="One Billion Word",
        splits="training shards 1 to 99; held-out shard 1 is validation, shard 0 test",
    )
