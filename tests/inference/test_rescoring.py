"""Word errors against a recursion over all alignments; tuned weights against a dense grid and planted optima."""

import gzip
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lm
from lm.inference.rescoring import Utterance, count_errors, line_search, tune, word_errors
from tests.conftest import Command

WORDS = st.lists(st.sampled_from("abcd"), max_size=6)


def fewest_errors(reference: list[str], hypothesis: list[str]) -> int:
    @cache
    def cost(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        same = cost(i - 1, j - 1) + (reference[i - 1] != hypothesis[j - 1])
        return min(same, cost(i - 1, j) + 1, cost(i, j - 1) + 1)

    return cost(len(reference), len(hypothesis))


@given(reference=WORDS, hypothesis=WORDS)
@settings(max_examples=200, deadline=None)
def test_errors_match_recursion(reference: list[str], hypothesis: list[str]) -> None:
    ((substitutions, insertions, deletions),) = count_errors([reference], [hypothesis]).tolist()
    assert substitutions + insertions + deletions == fewest_errors(reference, hypothesis)
    assert insertions - deletions == len(hypothesis) - len(reference)
    assert min(substitutions, insertions, deletions) >= 0


def random_utterances(seed: int, *, planted: Sequence[float] | None = None) -> list[Utterance]:
    """Make n-best lists; with `planted` weights, the best hypothesis has no errors and the others have some.

    A fourth planted weight is that of a second other score.
    """
    generator, utterances = np.random.default_rng(seed), []
    for _ in range(60):
        features = np.column_stack(
            [-generator.exponential(20, 8), -generator.integers(1, 12, 8), -generator.exponential(20, 8)]
        ).astype(float)
        features = np.column_stack([features, -generator.exponential(20, 8)])[
            :, : 3 if planted is None else len(planted)
        ]
        errors = generator.integers(1, 9, (8, 3))
        if planted is not None:
            errors[int(np.argmax(features @ np.array(planted)))] = 0
        utterances.append(Utterance(features, errors, 10))
    return utterances


@pytest.mark.parametrize("seed", range(5))
def test_line_search_matches_dense_grid(seed: int) -> None:
    utterances, weights = random_utterances(seed), np.array([1.0, 0.5, 1.0])

    def errors(value: float) -> int:
        return word_errors(utterances, np.array([value, *weights[1:]])).total

    found = weights[0] + line_search(utterances, weights, np.array([1.0, 0.0, 0.0]))
    assert errors(found) <= min(map(errors, np.linspace(-99, 101, 4001)))


@pytest.mark.parametrize("planted", [(0.7, 1.5, 1), (3.0, -2.0, 1), (0.1, 0.0, 1), (0.7, 1.5, 1, 0.3), (2, 1, 1, 5)])
def test_tuning_finds_planted_weights(planted: tuple[float, ...]) -> None:
    utterances, start = random_utterances(7, planted=planted), [1.0, 0.0, *[1.0] * (len(planted) - 2)]
    weights = tune(utterances, start)
    assert word_errors(utterances, weights).total == 0 and weights[2] > 0
    assert (weights == tune(utterances, start)).all()


LIST = "u1-1\t-2\tw000001 w000002\nu1-2\t-1\tw000002\nu2-1\t-1\tw000003\nu2-2\t-3\tw000003 w000001\n"


def test_tune_from_the_command_line(tiny_run: Path, command: Command, workspace: Path) -> None:
    (workspace / "list").write_text(LIST)
    (workspace / "refs").write_text("u1 w000001 w000002\n\nu2 w000003\n")
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=score", "format=nbest", "input=list", "best=numbered"]
    plain = command(*ask, "references=refs", "lm_weight=0")
    assert "WER 33.33%: 1 error in 3 words (0 insertions, 1 deletion, 0 substitutions)" in plain.stderr
    done = command(*ask, "references=refs", "tune=true", "lm_weight=0")
    tuned = next(line for line in done.stderr.splitlines() if line.startswith("Tuned: ")).split()[1:]
    assert "WER 0.00%" in done.stderr and done.stdout.splitlines() == ["u1 w000001 w000002", "u2 w000003"]
    assert command(*ask, *tuned).stdout == done.stdout
    (workspace / "refs").write_text("u1 w000001 w000002\n")
    assert "'u2' has none" in command(*ask, "references=refs", check=2).stderr


def test_kaldi_scores_and_srilm_lists(tiny_run: Path, command: Command, workspace: Path) -> None:
    (workspace / "list").write_text("utt-1 w000001 w000002\nutt-2\n")
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=score"]
    rows = [line.split(" ") for line in command(*ask, "format=kaldi", "input=list").stdout.splitlines()]
    model = lm.load(tiny_run)
    for (name, *values), text in zip(rows, ["w000001 w000002", ""], strict=True):
        assert name.startswith("utt-") and [-float(v) for v in values] == pytest.approx(
            model.score(text).log_probs, abs=1e-5
        )
    for name in ("a", "b"):
        (workspace / f"{name}.nbest").write_text("-12.5 -3.25 2 w000001 w000002\n-11 -4e0 1 w000003\n")
    listed = command(*ask, "format=nbest", "input=*.nbest").stdout.splitlines()
    assert [line.split("\t")[0] for line in listed] == ["a", "a", "b", "b"]
    assert [line.split("\t")[3:] for line in listed[:2]] == [
        ["-12.5", "-3.25", "w000001 w000002"],
        ["-11", "-4e0", "w000003"],
    ]


def test_tuned_weights_of_several_scores(tiny_run: Path, command: Command, workspace: Path) -> None:
    """The second score finds the reference, the first one contradicts it."""
    for name, words in (("u1.A", "w000001 w000002"), ("u1.B", "w000003")):
        wrong = f"{words} w000004"
        number = len(words.split())
        lines = f"-3 -1 {number} {words}\n-2 -1.1 {number + 1} {wrong}\n"
        (workspace / f"{name}.gz").write_bytes(gzip.compress(lines.encode()))
    (workspace / "refs").write_text("u1.A w000001 w000002\nu1.B w000003\nu9 w000001\n")
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=score", "format=nbest", "input=*.gz", "best=same"]
    ask.append("lm_weight=0")
    plain = command(*ask, "references=refs")
    assert "WER 66.67%: 2 errors in 3 words (2 insertions" in plain.stderr
    assert "1 reference without hypotheses, left out" in plain.stderr
    done = command(*ask, "references=refs", "tune=true")
    tuned = next(line for line in done.stderr.splitlines() if line.startswith("Tuned: ")).split()[1:]
    assert tuned[-1].startswith("score_weights=[1,") and "WER 0.00%" in done.stderr
    assert done.stdout.splitlines() == ["u1.A w000001 w000002", "u1.B w000003"]
    assert command(*ask, *tuned).stdout == done.stdout
    assert command(*ask, "score_weights=[1,20]").stdout == done.stdout


def test_carried_state_follows_the_best_hypotheses(tiny_run: Path, command: Command, workspace: Path) -> None:
    """Scores equal those of one text made of the best hypotheses so far and each alternative."""
    (workspace / "list").write_text(LIST)
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=score", "state=carried"]
    nbest = [*ask, "format=nbest", "input=list", "best=numbered"]
    best = command(*nbest).stdout.splitlines()
    first = best[0].split(" ", 1)[1]
    (workspace / "texts").write_text("")
    expected = {}
    for text in ("w000003", "w000003 w000001"):
        (workspace / "texts").write_text(f"{first}\n{text}\n")
        lines = command(*ask, "input=texts").stdout.splitlines()
        expected[text] = float(lines[1].split("\t")[0])
    scores = {"w000003": -1 + expected["w000003"], "w000003 w000001": -3 + expected["w000003 w000001"]}
    assert best[1] == f"u2 {max(scores, key=scores.__getitem__)}"
    kaldi = command(*ask, "format=kaldi", "input=list", "best=numbered").stdout.splitlines()
    sums = {line.split()[0]: -sum(map(float, line.split()[1:])) for line in kaldi}
    assert [sums["u2-1"], sums["u2-2"]] == pytest.approx(list(expected.values()), abs=1e-5)
