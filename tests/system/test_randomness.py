"""Randomness depends only on seed, purpose and step."""

import torch

from lm.system.randomness import generator_for, seed_for


def test_seeds_differ_by_every_argument_and_fit_a_generator() -> None:
    seeds = {
        seed_for(s, p, t) for s in range(5) for p in ("dropout layer 1", "dropout layer 11", "plan") for t in range(50)
    }
    assert len(seeds) == 5 * 3 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_draws_do_not_depend_on_history() -> None:
    first = torch.rand(4, generator=generator_for(1, "plan", 7))
    torch.rand(100)
    assert torch.equal(torch.rand(4, generator=generator_for(1, "plan", 7)), first)
    assert not torch.equal(torch.rand(4, generator=generator_for(1, "plan", 8)), first)
