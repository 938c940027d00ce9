"""Independent, slow reference definitions of every output layer, one token at a time.

Each function computes log p(word | hidden) over the whole vocabulary for one hidden state.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.output.layers.dsoftmax import DSoftmax, DSoftmaxStar
from lm.output.layers.full import FullSoftmax, SelfNormalizedSoftmax
from lm.output.layers.hsm import HierarchicalSoftmax
from lm.output.layers.hsm_huffman import HuffmanSoftmax
from lm.output.layers.sampling import NCE, BlackOut, SampledSoftmax
from tests.helpers.layers import zipf_counts

Added = Callable[[int], Tensor | float]
"""Return the n-gram scores of a softmax: number 0 is the only one or the root, then one per cluster."""


def nothing(_: int) -> float:
    return 0.0


def log_distribution(layer, hidden: Tensor, added: Added = nothing) -> Tensor:
    """log p over the vocabulary, differentiable with respect to hidden and to every parameter of the layer."""
    match layer:
        case SelfNormalizedSoftmax():
            return normalize(layer.weight @ hidden + log_frequency(layer))
        case NCE():
            return normalize(layer.table.weight @ hidden + log_frequency(layer))
        case BlackOut():
            return normalize(layer.table.weight @ hidden)
        case HuffmanSoftmax():
            return huffman(layer, hidden)
        case FullSoftmax():
            return normalize(layer.weight @ hidden + added(0))
        case SampledSoftmax():
            return normalize(layer.table.weight @ hidden)
        case DSoftmaxStar():
            return dsoftmax_star(layer, hidden)
        case DSoftmax():
            return dsoftmax(layer, hidden)
        case AdaptiveSoftmax():
            return adaptive(layer, hidden, added)
        case HierarchicalSoftmax():
            return hierarchical(layer, hidden, added)
    raise AssertionError(type(layer))


def normalize(scores: Tensor) -> Tensor:
    return scores - torch.log(torch.exp(scores - scores.max()).sum()) - scores.max()


def dsoftmax(layer: DSoftmax, hidden: Tensor) -> Tensor:
    scores, start = [], 0
    for weight in layer.clusters:
        scores.append(weight @ hidden[start : start + weight.shape[1]])
        start += weight.shape[1]
    assert start == len(hidden)
    return normalize(torch.cat(scores))


def dsoftmax_star(layer: DSoftmaxStar, hidden: Tensor) -> Tensor:
    head, *tails = layer.clusters
    scores = [head @ hidden]
    for weight, projection in zip(tails, layer.projections, strict=True):
        scores.append(weight @ (projection @ hidden))
    return normalize(torch.cat(scores))


def adaptive(layer: AdaptiveSoftmax, hidden: Tensor, added: Added) -> Tensor:
    root = layer.head @ hidden + added(0)
    root = normalize(root if layer.head_bias is None else root + layer.head_bias)
    in_root = layer.shortlist
    parts = [root[:in_root]]
    leaves = list(layer.clusters)
    number = 1
    if not in_root:
        parts.append(root[0] + normalize(leaves.pop(0) @ hidden + added(number)))
        number += 1
    entries = root[len(root) - len(leaves) :]
    for tail, (entry, weight, projection) in enumerate(zip(entries, leaves, layer.projections, strict=True)):
        parts.append(entry + normalize(weight @ (projection @ hidden) + added(number + tail)))
    return torch.cat(parts)


def hierarchical(layer: HierarchicalSoftmax, hidden: Tensor, added: Added) -> Tensor:
    classes = layer.class_of_word_V.tolist()
    root = normalize(layer.classes @ hidden + added(0))
    # Word vectors are sorted by class, then by word id.
    row_of_word = {word: row for row, word in enumerate(sorted(range(len(classes)), key=lambda w: (classes[w], w)))}
    result: list[Tensor] = [root[0]] * len(classes)
    for number in range(len(layer.classes)):
        members = [w for w in range(len(classes)) if classes[w] == number]
        scores = torch.stack([layer.words[row_of_word[w]] @ hidden for w in members])
        inside = normalize(scores + added(1 + number))
        for word, value in zip(members, inside, strict=True):
            result[word] = root[number] + value
    return torch.stack(result)


def log_frequency(layer) -> Tensor:
    return torch.log(frequency(layer, dtype=torch.float64)).to(next(layer.parameters()).dtype)


def huffman(layer: HuffmanSoftmax, hidden: Tensor) -> Tensor:
    start, node, turn = (array.tolist() for array in layer.tree)
    result = []
    for word in range(layer.vocab_size):
        steps = range(start[word], start[word + 1])
        turns = [torch.nn.functional.logsigmoid(turn[i] * (layer.table.weight[node[i]] @ hidden)) for i in steps]
        result.append(torch.stack(turns).sum())
    return torch.stack(result)


def training_loss(layer, hidden: Tensor, targets: Tensor, plan) -> Tensor:
    """Compute the layer's training loss, averaged over scored tokens, given the samples in its plan."""
    if isinstance(layer, SampledSoftmax | NCE | BlackOut):
        times = dict(zip(plan.rows_U.tolist(), plan.times_U.tolist(), strict=True))
        drawn = {word: number for word, number in times.items() if number}
        assert sum(drawn.values()) == layer.num_samples
    terms = []
    for h, t in zip(hidden.flatten(0, -2), targets.flatten().tolist(), strict=True):
        if t == -100:
            continue
        match layer:
            case SampledSoftmax():
                terms.append(sampled_term(layer, h, t, drawn))
            case NCE():
                terms.append(nce_term(layer, h, t, drawn))
            case BlackOut():
                terms.append(blackout_term(layer, h, t, drawn))
            case SelfNormalizedSoftmax():
                scores = layer.weight @ h + log_frequency(layer)
                log_z = torch.log(torch.exp(scores - scores.max()).sum()) + scores.max()
                terms.append(log_z - scores[t] + layer.alpha * log_z * log_z)
            case _:
                terms.append(-log_distribution(layer, h)[t])
    return torch.stack(terms).mean() if terms else hidden.sum() * 0


def frequency(layer, power: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    counts = torch.as_tensor(zipf_counts(layer.vocab_size), dtype=torch.float64) ** power
    return (counts / counts.sum()).to(dtype or next(layer.parameters()).dtype)


def sampled_term(layer: SampledSoftmax, hidden: Tensor, target: int, drawn: dict[int, int]) -> Tensor:
    """Sampled softmax: the target against the other distinct samples, with logits minus log P(sampled)."""
    correction = torch.log(1 - (1 - frequency(layer).double()) ** layer.num_samples).to(hidden.dtype)
    words = [target, *(w for w in drawn if w != target)]
    return -normalize(layer.table.weight[words] @ hidden - correction[words])[0]


def nce_term(layer: NCE, hidden: Tensor, target: int, drawn: dict[int, int]) -> Tensor:
    """NCE: classify the target against every draw, even if a draw equals the target."""

    def log_odds(word: int) -> Tensor:
        start = layer.log_z if isinstance(layer.log_z, float) else 0.0  # normalized from the first step on
        score = layer.table.weight[word] @ hidden + log_frequency(layer)[word] + start - layer.log_z
        return (score - torch.log(layer.num_samples * frequency(layer)[word])).squeeze()

    loss = -torch.nn.functional.logsigmoid(log_odds(target))
    for word, times in drawn.items():
        loss = loss - times * torch.nn.functional.logsigmoid(-log_odds(word))
    return loss


def blackout_term(layer: BlackOut, hidden: Tensor, target: int, drawn: dict[int, int]) -> Tensor:
    """BlackOut: the target and each draw of another word, weighted by 1 / q."""
    draws = [word for word, times in drawn.items() if word != target for _ in range(times)]
    words = [target, *draws]
    weighted = layer.table.weight[words] @ hidden - torch.log(frequency(layer, power=0.4)[words])
    probs = torch.exp(normalize(weighted))
    return -normalize(weighted)[0] - torch.log(1 - probs[1:]).sum()
