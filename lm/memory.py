"""How much memory settings need, estimated from shapes alone, how much there is, and how much was used.

The model is laid out on the meta device, so that nothing is allocated. The factors of the LSTM's activations were
counted on real steps; the whole is good to about a fourth.
"""

import contextlib
import os
import resource
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lm.building import build_model
from lm.config import ClusteredConfig, Config, Precision
from lm.data.vocabulary import Vocabulary
from lm.model.language_model import LanguageModel
from lm.optim import Optimizer
from lm.output import AdaptiveSoftmax, HierarchicalSoftmax, SampledSoftmax
from lm.output.clusters import head_size, shares_of
from lm.output.fused import most_logits
from lm.processor import return_freed_memory
from lm.scoring import CHUNK_STEPS, CHUNK_TOKENS

FLOAT = 4
GIB = 1 << 30
PEAK_RESET = Path("/proc/self/clear_refs")
"""Writing 5 into it makes the kernel count a process's peak afresh."""
UNITS_PER_INPUT, UNITS_PER_CELL, WEIGHT_COPIES = 5, 14, 1
"""Numbers that an LSTM layer holds per token for each of its inputs and cells, and copies it makes of its weights."""


@dataclass(frozen=True)
class Needs:
    """Bytes at the peak of a training step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Of one group of streams: embedding and LSTM, forward and backward."""
    logits: int
    """As many as the output layer holds at once."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {size_of(getattr(self, field.name))}" for field in fields(self))


def size_of(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / (1 << 20):,.1f} MiB"


# ---- what settings need --------------------------------------------------------------------------------------------


def training_needs(config: Config, vocabulary: Vocabulary, *, num_ranks: int = 1) -> Needs:
    """Of one rank's training step with these settings; automatic clusters, not chosen yet, are taken to be one tail."""
    model = laid_out(config, vocabulary)
    optimizer = Optimizer(model, config.optim)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() for p in trained) * FLOAT
    groups = config.trainer.accumulate
    if groups > 1 or num_ranks > 1:  # the output layer's gradient, before it is added to other groups' or exchanged
        gradients += sum(p.numel() for p in model.output.parameters() if p.requires_grad) * FLOAT
    batch_size = config.trainer.batch_size // num_ranks
    streams = -(-batch_size // groups)
    # A stream may be shorter than the steps asked for.
    length = max(1, min(config.trainer.bptt, int(vocabulary.counts.sum()) // config.trainer.batch_size))
    tokens, step = length * streams, length * batch_size
    activations = _lstm_units(config, tokens=tokens, training=True) + 2 * step * config.model.embedding_size
    return Needs(
        parameters=sum(p.numel() * p.element_size() for p in model.parameters()),
        gradients=gradients,
        optimizer=_bytes_in(optimizer.state_dict()),
        activations=activations * FLOAT,
        logits=_logits(config, model, tokens=tokens, targets=step) * FLOAT,
    )


def scoring_needs(config: Config, vocabulary: Vocabulary) -> int:
    """Bytes that an evaluation needs besides the model."""
    tokens = max(CHUNK_STEPS * config.evaluate.batch_size, CHUNK_TOKENS)
    exact = laid_out(config, vocabulary)
    return FLOAT * (
        _lstm_units(config, tokens=tokens, training=False)
        + _logits(config, exact, tokens=tokens, targets=len(vocabulary), fused=True)
    )


def laid_out(config: Config, vocabulary: Vocabulary) -> LanguageModel:
    """The model's shapes."""
    output = config.output
    if isinstance(output, ClusteredConfig) and output.cutoffs == "auto":
        head = head_size(shares_of(vocabulary.counts), coverage=output.head_coverage)
        cutoffs = [head] if head < len(vocabulary) else []
        config = replace(config, output=replace(output, cutoffs=cutoffs))
    with torch.device("meta"):
        return build_model(config, vocabulary)


def _lstm_units(config: Config, *, tokens: int, training: bool) -> int:
    """Numbers held by embedding and LSTM for so many tokens."""
    model = config.model
    width = model.projection or model.hidden_size
    inputs = [model.embedding_size] + [width] * (model.layers - 1)
    if not training:
        return tokens * (UNITS_PER_INPUT * max(inputs) + UNITS_PER_CELL * model.hidden_size)
    units = tokens * sum(UNITS_PER_INPUT * size + UNITS_PER_CELL * model.hidden_size for size in inputs)
    units += tokens * 3 * width  # the output layer's input, its gradient, and a copy of what the tails see
    if model.dropout:
        units += tokens * 2 * (model.embedding_size + width * model.layers)
    weights = 4 * model.hidden_size * sum(size + width for size in inputs)
    return units + WEIGHT_COPIES * weights


def _logits(config: Config, model: LanguageModel, *, tokens: int, targets: int, fused: bool | None = None) -> int:
    """Numbers in the largest piece of logits held at once, and in what stands beside it."""
    output = model.output
    beside = 0
    blocks = [Softmax(tokens, output.vocab_size, sum(p.numel() for p in output.parameters()))]
    if isinstance(output, SampledSoftmax):
        words = min(output.vocab_size, output.num_samples + targets)
        blocks = [Softmax(tokens, words, words * output.width)]
        beside = 2 * words * output.width  # the rows, and their gradient
    elif isinstance(output, AdaptiveSoftmax):
        shares = output.describe()["coverage"][-len(output.clusters) :] if output.clusters else []
        tails = zip(output.clusters, shares, strict=True)
        blocks = [Softmax(tokens, len(output.head), output.head.numel())]
        blocks += [Softmax(max(1, int(tokens * share)), len(weight), weight.numel()) for weight, share in tails]
    elif isinstance(output, HierarchicalSoftmax):
        sizes = [len(output.classes), *output.cluster_sizes]
        blocks = [Softmax(tokens, size, size * output.width) for size in sizes]
    if config.output.fused if fused is None else fused:
        largest = max(most_logits(b.tokens, num_words=b.words, num_weights=b.weights) for b in blocks)
    else:  # logits, their log-softmax, their gradient
        largest = 3 * max(b.tokens * b.words for b in blocks)
    if config.trainer.precision is Precision.bf16:
        beside += max(b.weights for b in blocks) // 2 + largest // 2
    return largest + beside


class Softmax(NamedTuple):
    """One softmax of the output layer."""

    tokens: int
    words: int
    weights: int


def _bytes_in(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    return sum(map(_bytes_in, state.values())) if isinstance(state, dict) else 0


# ---- what there is, and what was used -------------------------------------------------------------------------------


def forget_peak(device: torch.device) -> None:
    """Count the peak from here on, where the system allows it; what came before, such as a corpus, is given back."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    return_freed_memory()
    with contextlib.suppress(OSError):
        PEAK_RESET.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak, of the device or, where that is the CPU, of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return resident("VmHWM")
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident(key: str) -> int:
    """Bytes of this process in memory: `VmRSS` now, `VmHWM` at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still have on a device; None where that cannot be told.

    The ranks of a machine without GPUs share its memory.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    shared = min(filter(None, [_free_of_machine(), _free_of_groups()]), default=None)
    share = None if shared is None else shared // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(filter(None, [share, _free_of_process()]), default=None)


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (kib["MemAvailable"] + kib.get("SwapFree", 0)) * 1024


def _free_of_groups() -> int | None:
    """The least that the control groups of a container or a cluster's job leave to this process."""
    try:
        return _free_below(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())
    except OSError:
        return None


def _free_below(root: Path, membership: str) -> int | None:
    own = next((line for line in membership.splitlines() if line.startswith("0::")), None)
    if own is None:
        return None
    group = root / own.removeprefix("0::").strip("/")
    groups = [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return min(filter(None, map(_free_of_group, groups)), default=None)


def _free_of_group(group: Path) -> int | None:
    """Pages of files do not count, they can be dropped."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(1, int(limit) - used + int(files["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return None


def _free_of_process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(1, limit - pages * os.sysconf("SC_PAGE_SIZE"))
