"""What each layer means, written once more, slowly and without looking at the product: one token at a time.

Every function gives log p(word | hidden) over the whole vocabulary for one hidden state, from named weights.
"""

import torch
from torch import Tensor

from lm.output.class_hierarchy import HierarchicalSoftmax
from lm.output.layers.adaptive import AdaptiveSoftmax
from lm.output.layers.dsoftmax import DSoftmax
from lm.output.layers.dsoftmax_star import DSoftmaxStar
from lm.output.layers.full import FullSoftmax
from lm.output.layers.sampled import SampledSoftmax


def log_distribution(layer, hidden: Tensor) -> Tensor:
    """log p over the vocabulary, differentiable with respect to hidden and to every parameter of the layer."""
    match layer:
        case FullSoftmax():
            return normalise(layer.weight @ hidden)
        case SampledSoftmax():
            return normalise(layer.table.weight @ hidden)
        case DSoftmax():
            return dsoftmax(layer, hidden)
        case DSoftmaxStar():
            return dsoftmax_star(layer, hidden)
        case AdaptiveSoftmax():
            return adaptive(layer, hidden)
        case HierarchicalSoftmax():
            return hierarchical(layer, hidden)
    raise AssertionError(type(layer))


def normalise(scores: Tensor) -> Tensor:
    return scores - torch.log(torch.exp(scores - scores.max()).sum()) - scores.max()


def dsoftmax(layer: DSoftmax, hidden: Tensor) -> Tensor:
    scores, start = [], 0
    for weight in layer.clusters:
        scores.append(weight @ hidden[start : start + weight.shape[1]])
        start += weight.shape[1]
    assert start == len(hidden)
    return normalise(torch.cat(scores))


def dsoftmax_star(layer: DSoftmaxStar, hidden: Tensor) -> Tensor:
    head, *tails = layer.clusters
    scores = [head @ hidden]
    for weight, projection in zip(tails, layer.projections, strict=True):
        scores.append(weight @ (projection @ hidden))
    return normalise(torch.cat(scores))


def adaptive(layer: AdaptiveSoftmax, hidden: Tensor) -> Tensor:
    root = layer.head @ hidden
    root = normalise(root if layer.head_bias is None else root + layer.head_bias)
    in_root = layer.shortlist
    parts = [root[:in_root]]
    leaves = list(layer.clusters)
    if not in_root:
        parts.append(root[0] + normalise(leaves.pop(0) @ hidden))
    entries = root[len(root) - len(leaves) :]
    for entry, weight, projection in zip(entries, leaves, layer.projections, strict=True):
        parts.append(entry + normalise(weight @ (projection @ hidden)))
    return torch.cat(parts)


def hierarchical(layer: HierarchicalSoftmax, hidden: Tensor) -> Tensor:
    classes = layer.class_of_word_V.tolist()
    root = normalise(layer.classes @ hidden)
    # Word vectors are kept class by class, and by word id within a class.
    row_of_word = {word: row for row, word in enumerate(sorted(range(len(classes)), key=lambda w: (classes[w], w)))}
    result: list[Tensor] = [root[0]] * len(classes)
    for number in range(len(layer.classes)):
        members = [w for w in range(len(classes)) if classes[w] == number]
        inside = normalise(torch.stack([layer.words[row_of_word[w]] @ hidden for w in members]))
        for word, value in zip(members, inside, strict=True):
            result[word] = root[number] + value
    return torch.stack(result)


def mean_nll(layer, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean over scored tokens of -log p(target), 0 if there are none."""
    terms = [
        -log_distribution(layer, h)[int(t)]
        for h, t in zip(hidden.flatten(0, -2), targets.flatten(), strict=True)
        if int(t) != -100
    ]
    return torch.stack(terms).mean() if terms else hidden.sum() * 0


def sampled_loss(layer: SampledSoftmax, hidden: Tensor, targets: Tensor, *, sample: list[int], counts) -> Tensor:
    """Each target against the distinct sampled words other than itself, logits corrected by log P(word is sampled)."""
    counts = torch.as_tensor(counts, dtype=torch.float64).clamp(min=1)
    q = counts / counts.sum()
    correction = torch.log(1 - (1 - q) ** layer.num_samples).to(hidden.dtype)
    terms = []
    for h, t in zip(hidden.flatten(0, -2), targets.flatten().tolist(), strict=True):
        if t == -100:
            continue
        words = [t, *(w for w in sample if w != t)]
        terms.append(-normalise(layer.table.weight[words] @ h - correction[words])[0])
    return torch.stack(terms).mean() if terms else hidden.sum() * 0
