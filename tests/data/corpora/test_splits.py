"""Which files, blocks and shards of the published corpora go to training, validation and test, against written lists.

Every file says its own number, digit by digit, so that the numbers can be read back from the ids.
"""

import random
from pathlib import Path

from lm.data.corpora.europarl import EuroparlConfig, EuroparlRelease
from lm.data.corpora.one_billion_word import OneBillionWordConfig, ShardOrder
from lm.data.corpora.text8 import Text8Config
from lm.data.corpus import Corpus
from lm.data.opening import open_corpus
from tests.data.fetch.test_archives import TOP, write_folder, write_tar, write_zip


def digits(number: int) -> str:
    return " ".join(f"{number:03d}")


def sentences(corpus: Corpus, split: str) -> list[str]:
    """The split's sentences, without the spaces."""
    text = "".join(corpus.vocabulary.decode(corpus.split(split)))
    return [sentence for sentence in text.split("</s>") if sentence]


def europarl(root: Path, archive: Path, release: EuroparlRelease) -> Corpus:
    return open_corpus(EuroparlConfig("europarl", str(root), 1, str(archive), language="fi", release=release))


def test_europarl_source(tmp_path: Path) -> None:
    names = [f"txt/fi/ep-{number:03d}.txt" for number in range(310)]
    files = {name: f"<SPEAKER>\n{digits(number)}\n" for number, name in enumerate(names)}
    shuffled = random.Random(1).sample(names, len(names))
    archive = write_tar(tmp_path / "europarl.tgz", {name: files[name] for name in shuffled})
    corpus = europarl(tmp_path, archive, EuroparlRelease.source)
    assert sentences(corpus, "valid") == ["098", "198", "298"]
    assert sentences(corpus, "test") == ["099", "199", "299"]
    train = [*range(98), *range(100, 198), *range(200, 298), *range(300, 310)]
    assert sentences(corpus, "train") == [f"{number:03d}" for number in train]


def test_europarl_aligned(tmp_path: Path) -> None:
    lines = "".join(f"{digits(block)}\n" + "\n" * 998 + f"{digits(block)}\n" for block in range(250))
    write_folder(tmp_path / "pair", {"europarl-v7.fi-en.fi": lines, "europarl-v7.fi-en.en": "english\n"})
    corpus = europarl(tmp_path, tmp_path / "pair", EuroparlRelease.aligned)
    assert sentences(corpus, "valid") == ["098", "098", "198", "198"]
    assert sentences(corpus, "test") == ["099", "099", "199", "199"]
    train = [*range(98), *range(100, 198), *range(200, 250)]
    assert sentences(corpus, "train") == [f"{number:03d}" for number in train for _ in range(2)]


def test_one_billion_word(tmp_path: Path) -> None:
    training = f"{TOP}/training-monolingual.tokenized.shuffled/news.en-{{:05d}}-of-00100"
    held_out = f"{TOP}/heldout-monolingual.tokenized.shuffled/news.en.heldout-{{:05d}}-of-00050"
    files = {training.format(number): f"T {digits(number)}\n" for number in range(1, 100)}
    files |= {held_out.format(number): f"H {digits(number)}\n" for number in range(50)}
    archive = write_tar(tmp_path / "b.tar.gz", dict(reversed(files.items())))
    settings = OneBillionWordConfig("one_billion_word", str(tmp_path), 1, str(archive), shard_order=ShardOrder.fixed)
    corpus = open_corpus(settings)
    assert sentences(corpus, "train") == [f"T{number:03d}" for number in range(1, 100)]
    assert sentences(corpus, "valid") == ["<unk>001"]
    assert sentences(corpus, "test") == ["<unk>000"]


def test_text8(tmp_path: Path) -> None:
    blocks = [digits(number).translate(str.maketrans("0123456789", "abcdefghij")) for number in range(200)]
    archive = write_zip(tmp_path / "t.zip", {"text8": " ".join(blocks) + " "})
    corpus = open_corpus(Text8Config("text8", str(tmp_path), 1, str(archive)))
    words = ["".join(sentences(corpus, split)) for split in ("train", "valid", "test")]
    assert words[0] == "".join(blocks[:198]).replace(" ", "")
    assert words[1] == words[2] == "bjibjj"  # 198 and 199
