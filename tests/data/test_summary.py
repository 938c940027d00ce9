"""After preparing, a few lines say what was done."""

from collections.abc import Callable

from lm.config import TextConfig
from lm.data import open_corpus


def test_rule_words_marks_and_splits_are_told(text_folder: Callable[..., TextConfig]) -> None:
    notices: list[str] = []
    open_corpus(text_folder(train="a b b\na b c\n", min_count=1, lowercase=True), notice=notices.append)
    lines = [line.split(maxsplit=1) for line in notices[1].splitlines()]
    told = dict(lines)
    assert list(told) == [
        *("min_count", "tokens", "lowercase", "encoding_errors", "sentences", "splits"),
        *("kept", "train", "valid", "test", "speed"),
    ]
    assert (told["min_count"], told["tokens"], told["lowercase"]) == ("1", r"\S+", "yes")
    assert told["splits"] == "train.txt, valid.txt, test.txt"
    assert told["kept"] == "3 words, </s> 2 times, <unk> 0 times"
    assert told["train"] == "8 tokens, 6 words, 12 characters; 0.00% <unk>"
    assert told["test"] == "3 tokens, 2 words, 4 characters; 33.33% <unk>"
    assert told["speed"].endswith("MB/s")
