"""`evaluate.py mode=score format=nbest`: rescore n-best lists from speech recognition or translation.

Each line is `id text`, as in Kaldi, or tab-separated id, other scores and text, or a line of SRILM's format in a file
named after the utterance. A line's total is the weighted sum of its other scores plus `lm_weight` times the model's
log-probability minus `word_penalty` per word. `format=kaldi` writes Kaldi's sentence scores instead.

Shapes: T steps, B hypotheses of an utterance.
"""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from itertools import groupby, tee
from operator import mul
from pathlib import Path

import numpy as np
import torch

from lm.config.inference import BestOf, EvaluateConfig
from lm.config.validate import LARGEST
from lm.data.source import rule_of
from lm.data.text.tokenize import TokenRule
from lm.data.text.vocabulary import EOS
from lm.inference.lines import LineBlock, Totals, measure_lines, open_lines, scored, write_lines
from lm.inference.open_model import LoadedModel
from lm.inference.rescoring import Utterance, count_errors, read_references, tune, word_errors
from lm.system.console import counted, printable, say
from lm.system.errors import UserError

SRILM_LINE = re.compile(r"(-?[\d.]+(?:e[-+]?\d+)?) (-?[\d.]+(?:e[-+]?\d+)?) (\d+) ?(.*)")
"""Acoustic score, language model score, number of words, words."""
SPACED_SCORE = re.compile(r"(\S+ +)?-\d+\.\d+ ")
"""Start of a line whose scores are separated by spaces instead of tabs, or of an SRILM line with a wrong count."""
NUMBER = re.compile(r"-\d+$")
"""Number of a hypothesis at the end of its id, for `best=numbered`."""
ENDINGS = re.compile(r"(\.(nbest|score|txt|gz|bz2|xz|zst))+$")
"""File endings that are not part of an utterance's name."""


@dataclass
class Hypothesis:
    """One line of an n-best list."""

    id: str
    scores: list[str]
    """Scores from other models, as given in the list."""
    text: str
    words: list[str] = field(default_factory=list)
    """The words of the text, as the run's tokenizer splits it."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of each word and of `</s>` under this model."""

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)

    @property
    def features(self) -> list[float]:
        """Our log-probability, minus the number of words, and the other scores."""
        return [self.log_prob, -len(self.words), *map(float, self.scores)]

    def total(self, weights: Sequence[float]) -> float:
        """Return the weighted sum of the features; scores without a weight have a weight of 1."""
        features = self.features
        return math.fsum(map(mul, features, [*weights, *[1.0] * len(features)]))

    def utterance(self, best: BestOf) -> str:
        """Return the utterance id, without the hypothesis number if ids are numbered (`id-1`, `id-2`)."""
        return self.id if best == "same" else NUMBER.sub("", self.id)


def score_nbest(config: EvaluateConfig, loaded: LoadedModel) -> None:
    """Write the list with the model's scores, or each utterance's best line; totals and word errors go to stderr."""
    totals, weights = Totals(), weights_of(config)
    score_all = score_in_context if config.state == "carried" else score_alone
    hypotheses: Iterable[Hypothesis] = score_all(config, loaded, totals)
    if config.references is not None:
        assert config.best is not None
        hypotheses = listed = list(hypotheses)
        utterances = with_errors(listed, config.best, references=config.references)
        num_features = utterances[0].features_HK.shape[1]
        weights = [*weights, *[1.0] * (num_features - len(weights))][:num_features]
        if config.tune:
            tuned_K = tune(utterances, weights)
            tuned_K /= abs(tuned_K[2:3]).sum() or 1  # the first other score has a weight of 1 or -1
            lm_weight, word_penalty, *others = shown = [f"{weight:.6g}" for weight in tuned_K]
            scores = "" if others in ([], ["1"]) else f" score_weights=[{','.join(others)}]"
            say(f"Tuned: lm_weight={lm_weight} word_penalty={word_penalty}{scores}", to=sys.stderr)
            weights = [float(weight) for weight in shown]  # as printed
        say(str(word_errors(utterances, np.array(weights))), to=sys.stderr)
    lines: Iterable[str]
    if config.format == "kaldi":
        lines = (f"{each.id} {' '.join(f'{-value:.6f}' for value in each.log_probs)}" for each in hypotheses)
    elif config.best is None:
        lines = (_as_line(each, each.total(weights)) for each in hypotheses)
    else:
        lines = best_lines(hypotheses, config.best, weights)
    write_lines(lines, config.out)
    say(str(totals), to=sys.stderr)


def weights_of(config: EvaluateConfig) -> list[float]:
    """Return the configured weights of a hypothesis' features."""
    return [config.lm_weight, config.word_penalty, *config.score_weights]


def read_list(config: EvaluateConfig, rule: TokenRule) -> Iterator[Hypothesis]:
    """Yield the hypotheses of a file, or of several that match a pattern."""
    source = config.input or "-"
    is_file = source == "-" or Path(source).exists()
    files = [source] if is_file else sorted(glob(source)) or [source]  # noqa: PTH207
    for file in files:
        for number, line in enumerate(open_lines(file), 1):
            hypothesis = parse(line, source=file, number=number)
            if config.best == "numbered" and not NUMBER.search(hypothesis.id):
                raise UserError(
                    f"best=numbered needs ids that end in -1, -2 and so on; got {printable(hypothesis.id)!r} in line "
                    f"{number}. Try best=same, or write id-1<TAB>score<TAB>text."
                )
            hypothesis.words = rule.words(hypothesis.text)
            yield hypothesis


def score_alone(config: EvaluateConfig, loaded: LoadedModel, totals: Totals) -> Iterator[Hypothesis]:
    """Score each hypothesis from a zero state."""
    listed, unread = tee(read_list(config, rule_of(loaded.data)))
    results = scored(([*each.words, EOS] for each in unread), config, loaded, totals)
    for (_, log_probs), hypothesis in zip(results, listed, strict=True):
        hypothesis.log_probs = log_probs.tolist()
        yield hypothesis


@torch.no_grad()
def score_in_context(config: EvaluateConfig, loaded: LoadedModel, totals: Totals) -> Iterator[Hypothesis]:
    """Score an utterance's hypotheses from the state after the best hypothesis of the utterance before."""
    assert config.best is not None
    best, weights, state = config.best, weights_of(config), loaded.model.initial_state(1)
    for _, group in groupby(read_list(config, rule_of(loaded.data)), lambda each: each.utterance(best)):
        hypotheses = list(group)
        measured = measure_lines([[*each.words, EOS] for each in hypotheses], loaded, state=state)
        for hypothesis, (tokens, log_probs) in zip(hypotheses, measured, strict=True):
            totals.add(tokens, log_probs)
            hypothesis.log_probs = log_probs.tolist()
        yield from hypotheses
        chosen = max(hypotheses, key=lambda hypothesis: hypothesis.total(weights))
        inputs = LineBlock.of([[EOS, *chosen.words]], loaded).inputs
        _, state = loaded.model.read(torch.from_numpy(inputs)[:, None].to(loaded.model.device), state)


def with_errors(hypotheses: Sequence[Hypothesis], best: BestOf, *, references: str) -> list[Utterance]:
    """Compare hypotheses with the references. A missing score is 0."""
    words_of = read_references(open_lines(references, key="references"), source=references)
    num_features, utterances = max(len(each.features) for each in hypotheses), []
    for name, group in groupby(hypotheses, lambda each: each.utterance(best)):
        if name not in words_of:
            hint = f"Add one, or try best={'numbered' if best == 'same' else 'same'}"
            raise UserError(f"references={references} must have a line for every utterance; {name!r} has none. {hint}.")
        members, reference = list(group), words_of[name]
        features_HK = np.zeros((len(members), num_features))
        for features_K, each in zip(features_HK, members, strict=True):
            features_K[: len(each.features)] = each.features
        errors_H3 = count_errors([reference] * len(members), [each.text.split() for each in members])
        utterances.append(Utterance(features_HK, errors_H3, len(reference)))
    if missing := len(words_of) - len(utterances):
        say(f"{counted(missing, 'reference')} without hypotheses, left out of the word error rate.", to=sys.stderr)
    return utterances


def best_lines(hypotheses: Iterable[Hypothesis], best: BestOf, weights: Sequence[float]) -> Iterator[str]:
    """Yield `id text` of each utterance's best hypothesis by total score; the first one wins ties."""
    seen: set[str] = set()
    lines = 0
    for utterance, group in groupby(hypotheses, lambda hypothesis: hypothesis.utterance(best)):
        if utterance in seen:
            raise UserError(
                f"An utterance's hypotheses must be on consecutive lines; those of {utterance!r} are not. Sort the "
                f"list by id, or try best={'numbered' if best == 'same' else 'same'}."
            )
        seen.add(utterance)
        lines += len(members := list(group))
        chosen = max(members, key=lambda hypothesis: hypothesis.total(weights))
        yield printable(f"{utterance} {chosen.text}".rstrip())
    if best == "same" and len(seen) == lines > 1:
        say("Every utterance has one hypothesis. Do the ids end in -1, -2? Try best=numbered.", to=sys.stderr)


def _as_line(hypothesis: Hypothesis, total: float) -> str:
    scores = "".join(f"\t{score}" for score in hypothesis.scores)
    return f"{printable(hypothesis.id)}\t{total:.6f}\t{hypothesis.log_prob:.6f}{scores}\t{printable(hypothesis.text)}"


def parse(line: str, *, source: str, number: int) -> Hypothesis:
    srilm = SRILM_LINE.fullmatch(line.strip())
    if srilm and int(srilm[3]) == len(srilm[4].split()):  # one file per utterance
        return Hypothesis(ENDINGS.sub("", Path(source).name), [srilm[1], srilm[2]], srilm[4])
    if line.startswith("NBestList"):
        raise UserError(
            f"input={source} must be an n-best list without a header; got SRILM's {printable(line.split()[0])}. Write "
            "it as lines of acoustic score, language model score, number of words and words."
        )
    if "\t" in line:
        name, *scores, text = line.rstrip("\n").split("\t")
    else:
        name, _, text = line.strip().partition(" ")
        scores = []
    name = name.strip()
    if not name or " " in name or not all(map(_is_number, scores)) or SPACED_SCORE.match(line):
        raise UserError(
            f"input={source}, line {number}: expected `id text`, or id, scores and text separated by tabs, or SRILM's "
            f"two scores, number of words and words; got {printable(line.strip()[:80])!r}. Fix the line, or try "
            "format=tsv for plain text."
        )
    return Hypothesis(name, [score.strip() for score in scores], text.strip())


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= LARGEST[float]  # sums of these are finite
    except ValueError:
        return False
