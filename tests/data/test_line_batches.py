"""Batches of lines against the text, one line at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.batches import IGNORE_INDEX, Lines, line_bounds

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
