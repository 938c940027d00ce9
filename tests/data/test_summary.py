"""After preparing, a few lines say what was done."""

from collections.abc import Callable

from lm.config.data import TextConfig
from lm.data import open_corpus


def test_rule_words_marks_and_splits_are_told(text_folder: Callable[..., TextConfig]) -> None:
    notices: list[str] = []
    open_corpus(text_folder(train="a b b\na b c\n", min_count=1, lowercase=True), notice=notices.append)
    told = dict(line.split(maxsplit=1) for line in notices[1].splitlines() if line)
    assert list(told) == [
        *("source", "min_count", "tokens", "lowercase", "encoding_errors", "sentences", "splits", "vocabulary"),
        *("split", "-----", "train", "valid", "test", "prepared"),
    ]
    assert (told["min_count"], told["tokens"], told["lowercase"]) == ("1", r"\S+", "yes")
    assert told["splits"] == "train.txt, valid.txt, test.txt"
    assert told["vocabulary"] == "5 words, among them <unk> (0 times in training) and </s> (2)"
    assert told["split"].split() == ["tokens", "words", "characters", "<unk>"]
    assert told["train"].split() == ["8", "6", "12", "0.00%"]
    assert told["test"].split() == ["3", "2", "4", "33.33%"]
    assert told["prepared"].endswith("MB/s")
