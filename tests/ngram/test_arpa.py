"""ARPA format: files round-trip, KenLM reads the same probabilities, and errors name the line."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lm.data.text.vocabulary import Vocabulary
from lm.ngram.arpa import read_arpa, write_arpa
from lm.ngram.kneser_ney import estimate
from lm.ngram.model import NgramModel
from lm.ngram.trie import count_ngrams
from lm.system.errors import UserError
from tests.helpers.ngrams import SlowArpa, log_probs

WORDS = Vocabulary.from_counts([("a", 40), ("b", 30), ("c", 20), ("d", 10)])
EOS, UNK = WORDS.eos_id, WORDS.unk_id


def text(length: int, seed: int) -> list[int]:
    """Return random words and sentence ends with skewed frequencies."""
    weights = np.array([5, 4, 3, 2, 1, 2.0])[: len(WORDS)]
    return np.random.default_rng(seed).choice(len(WORDS), length, p=weights / weights.sum()).tolist()


def counted(order: int, *, least: int = 1) -> NgramModel:
    counts = count_ngrams(np.array(text(600, 0)), order=order, vocab_size=len(WORDS), eos_id=EOS)
    min_counts = [1, *[least] * (order - 1)]
    return estimate(counts, modified=True, min_counts=min_counts, eos_id=EOS)[0]


def scores(model: NgramModel) -> list[float]:
    return log_probs(model, text(200, 1))


@pytest.mark.parametrize("name", ["model.arpa", "model.arpa.gz"])
@pytest.mark.parametrize(("order", "least"), [(1, 1), (2, 1), (4, 1), (4, 3)])
def test_arpa_round_trip(name: str, order: int, least: int, tmp_path: Path) -> None:
    model = counted(order, least=least)
    write_arpa(model, WORDS, tmp_path / name)
    again = read_arpa(tmp_path / name, WORDS)
    assert again.trie.edges == model.trie.edges
    np.testing.assert_array_equal(again.trie.words_M, model.trie.words_M)
    np.testing.assert_array_equal(again.trie.children_L, model.trie.children_L)
    assert scores(again) == pytest.approx(scores(model), abs=1e-5)
    assert again.trie.is_sound(len(WORDS))
    first = (tmp_path / name).read_bytes()
    write_arpa(model, WORDS, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


def test_orders_without_ngrams_round_trip(tmp_path: Path) -> None:
    """Uses a text with only short sentences."""
    counts = count_ngrams(np.array([0, EOS, 1, EOS, 0, EOS]), order=5, vocab_size=len(WORDS), eos_id=EOS)
    model, _ = estimate(counts, modified=True, min_counts=[1] * 5, eos_id=EOS)
    assert model.trie.sizes[3:] == [0, 0]
    write_arpa(model, WORDS, tmp_path / "model.arpa")
    again = read_arpa(tmp_path / "model.arpa", WORDS)
    assert again.trie.edges == model.trie.edges and again.trie.is_sound(len(WORDS))
    assert scores(again) == pytest.approx(scores(model), abs=1e-5)


def test_kenlm_reads_same_probabilities(tmp_path: Path) -> None:
    kenlm = pytest.importorskip("kenlm", reason="PyPI's kenlm is not installed")
    write_arpa(model := counted(4), WORDS, tmp_path / "model.arpa")
    theirs = kenlm.LanguageModel(str(tmp_path / "model.arpa"))
    words = [*text(200, 1), EOS]
    ours = iter(log_probs(model, words))
    for sentence in " ".join(WORDS.words[word] for word in words).split(WORDS.words[EOS])[:-1]:
        for log_10, _, _ in theirs.full_scores(sentence.strip()):
            assert log_10 == pytest.approx(next(ours) / np.log(10), abs=1e-4)
    assert next(ours, None) is None


def test_missing_lower_order_ngrams_are_added(tmp_path: Path) -> None:
    """Pruning programs write such files: `a b c` without `b c`."""
    lines = ["-0.5 a -0.1", "-0.6 b -0.2", "-0.7 c -0.3", "-0.8 d", "-0.9 <unk>", "-1.0 </s>", "-99 <s> -0.4"]
    (tmp_path / "pruned.arpa").write_text(
        "made by hand\n\n\\data\\\nngram 1=7\nngram 2=1\nngram 3=1\n\n\\1-grams:\n"
        + "\n".join(lines)
        + "\n\n\\2-grams:\n-0.25 a b -0.15\n\n\\3-grams:\n-0.125 a b c\n\n\\end\\\n"
    )
    model = read_arpa(tmp_path / "pruned.arpa", WORDS)
    a, b, c, d = (WORDS.ids[word] for word in "abcd")
    expected = [-0.4 - 0.5, -0.25, -0.125, -0.3 - 0.8]
    assert np.array(log_probs(model, [a, b, c, d])) / np.log(10) == pytest.approx(expected)
    assert model.distributions(np.array([[b, a]]))[0, d] / np.log(10) == pytest.approx(-0.15 - 0.2 - 0.8)


FOREIGN = """\\data\\
ngram 1=7
ngram 2=6

\\1-grams:
-99 <s> {start}
-1.0 </s>
-0.7 <unk> 0
-0.6 a {a}
-0.7 b 0
-0.7 zebra 0
-0.9 yak 0

\\2-grams:
-0.3 <s> a
-0.5 <s> zebra
-0.2 a b
-0.9 a zebra
-0.5 b </s>
-0.4 zebra b

\\end\\
"""
"""A file with two words that the data does not have, and without `c` and `d`."""


def foreign_file(folder: Path) -> Path:
    """Write FOREIGN with the back-offs that make its probabilities sum to one."""
    unigrams = {"</s>": 0.1, "<unk>": 10**-0.7, "a": 10**-0.6, "b": 10**-0.7, "zebra": 10**-0.7}
    unigrams["yak"] = 1 - sum(unigrams.values())
    seen = {
        "start": {"a": -0.3, "zebra": -0.5},
        "a": {"b": -0.2, "zebra": -0.9},
        "b": {"</s>": -0.5},
        "zebra": {"b": -0.4},
    }
    back_offs = {
        context: np.log10((1 - sum(10**log for log in words.values())) / (1 - sum(unigrams[word] for word in words)))
        for context, words in seen.items()
    }
    text = FOREIGN.format(**back_offs).replace("-0.9 yak", f"{np.log10(unigrams['yak'])} yak")
    text = text.replace("-0.7 b 0", f"-0.7 b {back_offs['b']}").replace("zebra 0", f"zebra {back_offs['zebra']}")
    (folder / "foreign.arpa").write_text(text)
    return folder / "foreign.arpa"


def test_file_with_other_words_is_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = foreign_file(tmp_path)
    model, slow = read_arpa(path, WORDS), SlowArpa(path.read_text())
    printed = capsys.readouterr().out
    assert "lacks 2 words of the data (30.00% of the training tokens)" in printed
    assert "has 2 other words; their 5 n-grams are dropped" in printed
    assert "in the file" not in printed, "the file itself sums to one"
    assert "over the data's words sum to 0." in printed
    names = dict(enumerate(WORDS.words))
    for first, second in [("a", "b"), ("a", "a"), ("b", EOS), (EOS, "a"), (EOS, "b"), ("b", "a")]:
        a, b = (WORDS.ids[word] if isinstance(word, str) else word for word in (first, second))
        expected = slow.log_prob("<s>" if a == EOS else names[a], names[b])
        assert model.score(np.array([[a]]), np.array([b]))[0] / np.log(10) == pytest.approx(expected, abs=1e-6)
    shared = [np.exp(model.log_probs_M[word]) for word in (UNK, WORDS.ids["c"], WORDS.ids["d"])]
    assert shared == pytest.approx([10**-0.7 / 3] * 3)


def test_renormalized_file_sums_to_one_and_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = read_arpa(foreign_file(tmp_path), WORDS, renormalize=True)
    assert "sum to" not in capsys.readouterr().out
    contexts = np.arange(len(WORDS))[:, None]
    np.testing.assert_allclose(np.exp(model.distributions(contexts)).sum(1), 1, atol=1e-9)
    write_arpa(model, WORDS, tmp_path / "again.arpa")
    slow = SlowArpa((tmp_path / "again.arpa").read_text())
    for context in ("<s>", "a", "b", "c"):
        assert sum(10 ** slow.log_prob(context, word) for word in WORDS.words) == pytest.approx(1, abs=1e-6)


def test_unnormalized_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = foreign_file(tmp_path)
    path.write_text(path.read_text().replace("-0.2 a b", "-0.01 a b"))
    read_arpa(path, WORDS)
    assert re.search(r"Probabilities in the file sum to \S+ to 1\.3", capsys.readouterr().out)
    foreign_file(tmp_path)
    path.write_text(re.sub(r"-0.6 a .*", "-0.6 a 50", path.read_text()))
    read_arpa(path, WORDS)
    assert re.search(r"Probabilities in the file sum to \S+ to inf, depending", capsys.readouterr().out)
    unigrams = FOREIGN[: FOREIGN.index("\\2-")].replace("ngram 2=6\n", "") + "\\end\\\n"
    path.write_text(unigrams.format(start="", a="").replace(" 0\n", "\n").replace("-0.6 a", "-0.1 a"))
    read_arpa(path, WORDS)
    assert "Probabilities in the file sum to 1." in capsys.readouterr().out


MISTAKES: list[Callable[[str], str]] = [
    lambda text: text.replace("\\data\\", "data"),
    lambda text: text.replace("\\2-grams:", "\\4-grams:"),
    lambda text: text[: text.index("\\3-grams:")],
    lambda text: text.replace("\\end\\", ""),
    lambda text: text.replace("ngram 2=", "ngram 3="),
    lambda text: text.replace("ngram 1=7", "ngram 1=8"),
    lambda text: re.sub(r"(?<=ngram 2=)\d+", "9", text),
    lambda text: text.replace("-99\t<s>", "nan\t<s>"),
    lambda text: text.replace("-99\t<s>\t", "-99\t<s>\tinf"),
    lambda text: text.replace("-99\t<s>\t-", "-99\t<s>\tx"),
    lambda text: text.replace("\\end\\", "-1\ta b c\n\\end\\"),
    lambda text: text.replace("-99\t<s>\t-", "-99\t<s>\t-1_"),
    lambda text: text.replace("-99\t<s>", "-9_9\t<s>"),
    lambda text: text.replace("-99\t<s>", "-99\t<s>\t0"),  # another column
    lambda text: text.replace("-99\t<s>\t-", "-99\t<s>\t101"),
    lambda text: text.replace("\ta b\t", "\ta a\t", 1),
    lambda text: text.replace("\ta b\t", "\ta zebra\t", 1),
    lambda text: text.replace("\ta b\t", "\ta <s>\t", 1),
    lambda text: text.replace("\td\t", "\tc\t", 1),
    lambda _: "".join(f"ngram {n}=1\n" for n in range(1, 11)),
    lambda _: "\\data\\\n" + "".join(f"ngram {n}=1\n" for n in range(1, 11)) + "\n",
    lambda _: "",
    lambda text: text.replace("\n\n\\end", " 0.5\n\n\\end"),  # a back-off on the longest n-grams
    lambda text: re.sub(r"\n[^\n]*\td\t[^\n]*", "", text.replace("ngram 1=7", "ngram 1=6"), count=1),
]


@pytest.mark.parametrize("i", range(len(MISTAKES)))
def test_errors_name_file_and_line(i: int, tmp_path: Path) -> None:
    path = tmp_path / "model.arpa"
    write_arpa(counted(3), WORDS, path)
    changed = MISTAKES[i](path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    with pytest.raises(UserError) as caught:
        read_arpa(path, WORDS)
    assert f"arpa={path}, line " in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable_files_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_arpa(tmp_path / "absent", WORDS)
    path = tmp_path / "cut.arpa.gz"
    write_arpa(counted(2), WORDS, path)
    packed = path.read_bytes()
    path.write_bytes(packed[:-20])
    with pytest.raises(UserError, match="cannot be read: it ends early"):
        read_arpa(path, WORDS)
    path.write_bytes(packed[:30] + b"\xff" * 6 + packed[36:])
    with pytest.raises(UserError, match="cannot be read: Error -3"):
        read_arpa(path, WORDS)
    for position in range(-8, 0):  # the checksum and the length
        changed = bytearray(packed)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UserError, match="cannot be read: Error -3"):
            read_arpa(path, WORDS)


def test_words_invalid_in_arpa_raise(tmp_path: Path) -> None:
    strange = Vocabulary.from_counts([("a", 40), ("b c", 30), ("c", 20), ("d", 10)])
    with pytest.raises(UserError, match="b c"):
        write_arpa(counted(2), strange, tmp_path / "model.arpa")
    assert not (tmp_path / "model.arpa").exists()
