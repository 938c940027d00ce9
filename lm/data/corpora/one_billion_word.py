"""One Billion Word: shuffled English news sentences, already tokenised, case kept, in 99 training shards.

Test is held-out shard 0 and validation shard 1. The shards form one stream in their published order.
"""

from dataclasses import dataclass, field
from enum import Enum

from lm.config.registry import plugin
from lm.config.rules import Count
from lm.data.archive import Archive
from lm.data.recipes import archive_recipe
from lm.data.settings import ArchiveConfig
from lm.data.text.reading import Part, Text
from lm.data.text.tokenize import SPACES, TokenRule
from lm.data.write import Recipe
from lm.system.errors import UserError

TOP = "1-billion-word-language-modeling-benchmark-r13output"
_LAYOUT = (
    "training-monolingual.tokenized.shuffled/news.en-000[0-9][0-9]-of-00100",
    "heldout-monolingual.tokenized.shuffled/news.en.heldout-0000[01]-of-00050",
)
ARCHIVE = Archive(
    f"{TOP}.tar.gz",
    url=f"https://www.statmt.org/lm-benchmark/{TOP}.tar.gz",
    members=(*_LAYOUT, *(f"{TOP}/{pattern}" for pattern in _LAYOUT)),  # data.archive may be the top folder
    unpacked=TOP,
    size=1_792_209_805,
    sha256="01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
)
SHARDS = {
    "train": [f"news.en-{number:05d}-of-00100" for number in range(1, 100)],
    "valid": ["news.en.heldout-00001-of-00050"],
    "test": ["news.en.heldout-00000-of-00050"],
}


class ShardOrder(Enum):
    """The order in which an epoch reads the training shards; see `lm.data.batches`."""

    fixed = "fixed"
    shuffled = "shuffled"


@dataclass
class OneBillionWordConfig(ArchiveConfig):
    """One Billion Word: shuffled English news sentences, already tokenised."""

    name: str = "one_billion_word"
    min_count: Count = 3
    shard_order: ShardOrder = field(default=ShardOrder.fixed, kw_only=True)
    """How training reads the 99 shards: in the published order, as in the paper, or in a new one each epoch."""

    @property
    def token_rule(self) -> TokenRule:
        return TokenRule(SPACES)

    @property
    def shuffles_shards(self) -> bool:
        return self.shard_order is ShardOrder.shuffled


@plugin("data", "one_billion_word", OneBillionWordConfig)
def recipe(config: OneBillionWordConfig) -> Recipe:
    def read(parts: dict[str, Part]) -> Text:
        if missing := [name for names in SHARDS.values() for name in names if name not in parts]:
            listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UserError(
                f"{config.archive or ARCHIVE.file!r} must contain training shards 1 to 99 and held-out shards 0 and 1 "
                f"of One Billion Word; it lacks {listed}. Download {ARCHIVE.file} again from {ARCHIVE.url}."
            )
        splits = {split: [parts[name] for name in names] for split, names in SHARDS.items()}
        return Text(splits, config.token_rule, errors=config.encoding_errors.value)

    return archive_recipe(
        config,
        read,
        archive=ARCHIVE,
        folder="one_billion_word",
        source="One Billion Word",
        sentences="lines",
        splits="training shards 1 to 99; held-out shard 1 is validation, shard 0 test",
        shards=True,
    )
