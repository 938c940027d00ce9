"""`evaluate.py mode=score format=nbest`: rescore n-best lists from speech recognition or translation.

Each line is `id text`, as in Kaldi, or tab-separated id, other scores and text. A line's total is the sum of its other
scores plus `lm_weight` times the model's log-probability minus `word_penalty` per word.
"""

import math
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from lm.config.inference import BestOf, EvaluateConfig
from lm.data.settings import rule_of
from lm.data.text.vocabulary import EOS
from lm.inference.lines import Totals, open_lines, scored, write_lines
from lm.inference.open_model import LoadedModel
from lm.system.console import printable, say
from lm.system.errors import UserError


@dataclass
class Hypothesis:
    """One line of an n-best list."""

    id: str
    scores: list[str]
    """Scores from other models, as given in the list."""
    text: str
    words: int = 0
    log_prob: float = 0.0
    """Log-probability under this model."""

    def total(self, *, lm_weight: float, word_penalty: float) -> float:
        return math.fsum(map(float, self.scores)) + lm_weight * self.log_prob - word_penalty * self.words

    def utterance(self, best: BestOf) -> str:
        """Return the utterance id, without the hypothesis number if ids are numbered (`id-1`, `id-2`)."""
        return self.id if best is BestOf.same else re.sub(r"-\d+$", "", self.id)


def score_nbest(config: EvaluateConfig, loaded: LoadedModel) -> None:
    """Write the list with the model's scores, or each utterance's best line; totals go to stderr."""
    source, rule, totals = config.input or "-", rule_of(loaded.data), Totals()
    waiting: deque[Hypothesis] = deque()

    def words() -> Iterator[list[str]]:
        for number, line in enumerate(open_lines(source), 1):
            hypothesis = parse(line, source=source, number=number)
            of_text = rule.words(hypothesis.text)
            hypothesis.words = len(of_text)
            waiting.append(hypothesis)
            yield [*of_text, EOS]

    def hypotheses() -> Iterator[Hypothesis]:
        for _, log_probs in scored(words(), config, loaded, totals):
            hypothesis = waiting.popleft()
            hypothesis.log_prob = float(log_probs.sum())
            yield hypothesis

    penalties = {"lm_weight": config.lm_weight, "word_penalty": config.word_penalty}
    if config.best is None:
        lines: Iterable[str] = (_as_line(each, each.total(**penalties)) for each in hypotheses())
    else:
        lines = best_lines(hypotheses(), config.best, **penalties)
    write_lines(lines, config.out)
    say(str(totals), to=sys.stderr)


def best_lines(
    hypotheses: Iterable[Hypothesis], best: BestOf, *, lm_weight: float, word_penalty: float
) -> Iterator[str]:
    """Yield `id text` of each utterance's best hypothesis by total score; the first one wins ties."""
    seen: set[str] = set()
    for utterance, group in groupby(hypotheses, lambda hypothesis: hypothesis.utterance(best)):
        if utterance in seen:
            raise UserError(
                f"An utterance's hypotheses must be on consecutive lines; those of {utterance!r} are not. Sort the "
                f"list by id, or try best={BestOf.numbered.value if best is BestOf.same else BestOf.same.value}."
            )
        seen.add(utterance)
        chosen = max(group, key=lambda hypothesis: hypothesis.total(lm_weight=lm_weight, word_penalty=word_penalty))
        yield printable(f"{utterance} {chosen.text}".rstrip())


def _as_line(hypothesis: Hypothesis, total: float) -> str:
    scores = "".join(f"\t{score}" for score in hypothesis.scores)
    return f"{printable(hypothesis.id)}\t{total:.6f}\t{hypothesis.log_prob:.6f}{scores}\t{printable(hypothesis.text)}"


def parse(line: str, *, source: str, number: int) -> Hypothesis:
    if "\t" in line:
        name, *scores, text = line.rstrip("\n").split("\t")
    else:
        name, _, text = line.strip().partition(" ")
        scores = []
    name = name.strip()
    if not name or " " in name or not all(map(_is_number, scores)):
        raise UserError(
            f"input={source}, line {number}: expected `id text`, or id, scores and text separated by tabs; "
            f"got {printable(line.strip()[:80])!r}. Fix the line, or try format=tsv for plain text."
        )
    return Hypothesis(name, [score.strip() for score in scores], text.strip())


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
