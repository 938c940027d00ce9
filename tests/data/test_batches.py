"""Streams and batches: text order, batch contents, and the prefetch thread."""

import threading
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.batches import IGNORE_INDEX, BatchLoader, Lines, Streams, line_bounds, to_device
from lm.output.base import OutputLayer
from lm.output.layers.full import FullSoftmax
from lm.output.layers.sampling import SampledSoftmax, SamplingConfig
from lm.system.errors import UserError
from lm.system.tree import leaves
from tests.helpers.training import no_waiting_for_the_gpu


@given(
    num_tokens=st.integers(1, 400), batch_size=st.integers(1, 9), bptt=st.integers(1, 30), num_epochs=st.integers(1, 3)
)
@settings(max_examples=200, deadline=None)
def test_streams_read_contiguous_parts_in_order(num_tokens, batch_size, bptt, num_epochs) -> None:
    if batch_size > num_tokens:
        return
    tokens = np.arange(num_tokens, dtype=np.uint16)
    streams = Streams(tokens, batch_size=batch_size, bptt=bptt, eos_id=999)
    length = num_tokens // batch_size
    read = [streams.read(step) for step in range(num_epochs * streams.steps_per_epoch)]
    targets = np.concatenate([targets for _, targets in read])
    inputs = np.concatenate([inputs for inputs, _ in read])
    for b in range(batch_size):
        part = list(range(b * length, (b + 1) * length))
        assert targets[:, b].tolist() == part * num_epochs
        assert inputs[:, b].tolist() == [999 if word == 0 else word - 1 for word in part] * num_epochs
    assert all(len(t) <= bptt for _, t in read)
    done = np.cumsum([0, *(t.size for _, t in read)])
    assert [streams.tokens_before(step) for step in range(len(read) + 1)] == done.tolist()


def test_more_streams_than_tokens_raises() -> None:
    with pytest.raises(UserError, match=r"trainer.batch_size must not exceed the training tokens \(5\); got 6"):
        Streams(np.zeros(5, np.uint16), batch_size=6, bptt=2, eos_id=0)


class OutputOnly:
    """Plans batches for an output layer without a model."""

    look_back, input = 0, SimpleNamespace(plan=lambda _: None)

    def __init__(self, output: OutputLayer) -> None:
        self.output = output

    def plan_output(self, targets_TB, groups, *, words_PB, generator):
        return self.output.plans(targets_TB, groups, generator=generator)


def make_loader(start: int, vocab_size: int = 50) -> BatchLoader:
    tokens = np.random.default_rng(1).integers(0, 50, 1000).astype(np.uint16)
    streams = Streams(tokens, batch_size=4, bptt=7, eos_id=3)
    return BatchLoader(streams, OutputOnly(FullSoftmax(width=2, vocab_size=vocab_size)), seed=1, start=start, pin=False)


def test_batch_has_its_distinct_words() -> None:
    with make_loader(0) as loader:
        for batch in islice(loader, 5):
            words_U, inverse_TB, *_ = batch.distinct
            assert words_U.tolist() == sorted(set(batch.inputs_TB.flatten().tolist()))
            assert torch.equal(words_U[inverse_TB], batch.inputs_TB)
            assert batch.num_tokens == batch.targets_TB.numel()


def test_loader_started_later_gives_the_same_batches() -> None:
    with make_loader(0) as early, make_loader(20) as late:
        for one, other in zip(islice(early, 20, 45), islice(late, 25), strict=True):
            assert torch.equal(one.inputs_TB, other.inputs_TB)
            assert torch.equal(one.targets_TB, other.targets_TB)


def test_error_in_the_thread_is_raised() -> None:
    with make_loader(0, vocab_size=10) as loader, pytest.raises(UserError, match="below the vocabulary size"):
        next(iter(loader))


def test_closed_loader_ends_its_thread() -> None:
    with make_loader(0) as loader:
        next(iter(loader))
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


def test_shared_tensors_are_copied_once() -> None:
    """The sampled softmax shares rows between micro-batches; they must stay shared on the device."""
    tokens = np.random.default_rng(1).integers(0, 50, 1000).astype(np.uint16)
    output = SampledSoftmax(SamplingConfig("sampled"), width=2, counts=np.arange(50, 0, -1))
    streams = Streams(tokens, batch_size=4, bptt=7, eos_id=3)
    with BatchLoader(streams, OutputOnly(output), seed=1, start=0, pin=False, micro_batches=2) as loader:
        moved = to_device(loader.make(0), torch.device("meta"))
    first, second = moved.plans
    assert first.rows_U is second.rows_U
    assert first.rows_U.is_meta
    assert first.column_N is not second.column_N


@pytest.mark.gpu
def test_batches_are_pinned_and_copied_asynchronously() -> None:
    tokens = np.random.default_rng(1).integers(0, 50, 1000).astype(np.uint16)
    output = SampledSoftmax(SamplingConfig("sampled"), width=2, counts=np.arange(50, 0, -1))
    streams = Streams(tokens, batch_size=4, bptt=7, eos_id=3)
    with BatchLoader(streams, OutputOnly(output), seed=1, start=0, pin=True, micro_batches=2) as loader:
        batch = next(iter(loader))
    assert all(leaf.is_pinned() for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    with no_waiting_for_the_gpu():
        moved = to_device(batch, torch.device("cuda"))
    assert torch.equal(moved.targets_TB.cpu(), batch.targets_TB)
    assert moved.plans[0].rows_U is moved.plans[1].rows_U


@given(num_tokens=st.integers(40, 3000), bptt=st.integers(10, 80), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_random_lengths_cover_the_text_once_per_epoch(num_tokens, bptt, seed) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    streams, plain = (Streams(tokens, batch_size=2, bptt=bptt, eos_id=999, length_seed=s) for s in (seed, None))
    assert streams.steps_per_epoch == plain.steps_per_epoch
    epochs = []
    for epoch in range(2):
        read = [streams.read(epoch * streams.steps_per_epoch + index)[1] for index in range(streams.steps_per_epoch)]
        assert all(len(targets) > 0 for targets in read)
        np.testing.assert_array_equal(np.concatenate(read), tokens[: num_tokens // 2 * 2].reshape(2, -1).T)
        done = np.cumsum([0, *(targets.size for targets in read)]) + epoch * (num_tokens // 2 * 2)
        steps = range(epoch * len(read), (epoch + 1) * len(read))
        assert [streams.tokens_before(step) for step in steps] == done[:-1].tolist()
        epochs.append([len(targets) for targets in read])
    if streams.steps_per_epoch > 10:
        assert epochs[0] != epochs[1] and np.std(epochs[0]) < 0.6 * bptt


# ---- lines -----------------------------------------------------------------------------------------------------------


EOS = 0


def text_of(lengths: list[int]) -> np.ndarray:
    """Return lines of these lengths, `</s>` included; all other words differ."""
    words = iter(range(1, 10_000))
    return np.array([word for n in lengths for word in [*(next(words) for _ in range(n - 1)), EOS]], np.uint16)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    batch_size=st.integers(1, 7),
    bptt=st.integers(1, 9),
    seed=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_every_line_is_read_once_per_epoch_from_its_start(lengths, batch_size, bptt, seed) -> None:
    tokens = text_of(lengths)
    lines = Lines(tokens, batch_size=batch_size, bptt=bptt, eos_id=EOS, seed=seed)
    expected = sorted(line.tolist() for line in np.split(tokens, np.cumsum(lengths)[:-1]))
    done = 0
    for epoch in range(2):
        found: list[list[int]] = []
        for step in range(epoch * lines.steps_per_epoch, (epoch + 1) * lines.steps_per_epoch):
            assert lines.tokens_before(step) == done
            inputs, targets = lines.read(step)
            assert inputs.shape == targets.shape == (len(targets), batch_size) and 0 < len(targets) <= bptt
            if lines.resets(step):
                current: list[list[int]] = [[] for _ in range(batch_size)]
                found += current  # type: ignore[arg-type]
            for stream in range(batch_size):
                scored = targets[:, stream] != IGNORE_INDEX
                assert not (np.diff(scored.astype(int)) > 0).any(), "padding comes last"
                words = targets[scored, stream].tolist()
                before = [EOS, *current[stream], *words][len(current[stream]) : -1] if words else []
                assert inputs[scored, stream].tolist() == before
                current[stream] += words
            done += int((targets != IGNORE_INDEX).sum())
        assert sorted(line for line in found if line) == expected
    assert done == 2 * len(tokens) == 2 * lines.tokens_per_epoch


def test_order_depends_on_seed_and_epoch() -> None:
    tokens = text_of([3, 4, 5] * 20)

    def first_targets(seed: int) -> list[str]:
        lines = Lines(tokens, batch_size=4, bptt=5, eos_id=EOS, seed=seed)
        return [str([lines.read(e * lines.steps_per_epoch + s)[1].tolist() for s in range(5)]) for e in range(2)]

    assert first_targets(1) == first_targets(1)
    assert len({*first_targets(1), *first_targets(2)}) == 4


@pytest.mark.parametrize("count", [1, 3])
def test_inputs_before_a_step_stay_within_the_line(count: int) -> None:
    tokens = text_of([7, 7])
    lines = Lines(tokens, batch_size=2, bptt=3, eos_id=EOS, seed=1)
    earlier = np.full((0, 2), -1)
    for step in range(lines.steps_per_epoch):
        expected = np.concatenate([np.full((count, 2), -1), earlier])[-count:]
        np.testing.assert_array_equal(lines.read_before(step, count), expected)
        earlier = np.concatenate([earlier, lines.read(step)[0]])


def test_text_without_final_end_of_line() -> None:
    starts, lengths = line_bounds(np.array([1, 2, EOS, EOS, 3]), eos_id=EOS)
    assert starts.tolist() == [0, 3, 4] and lengths.tolist() == [3, 1, 1]
