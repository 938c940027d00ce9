"""What a process sets for its threads and its memory; each test in a process of its own, because it lasts."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm.system.processor import prepare_processor, return_freed_memory
from tests.helpers.forks import Fork


def said_by(target: Callable[..., None], folder: Path, *arguments: object) -> str:
    child = Fork(target, *arguments, folder=folder)
    assert child.wait() == 0, child.err
    return child.out.strip()


def say_denormals(older_threads: bool) -> None:
    """How many are left of each thread's quarter of a product."""
    if older_threads:
        torch.set_num_threads(4)
        torch.ones(1 << 22).mul(1.0)
    prepare_processor(threads=4)
    bits = torch.full((1 << 22,), 1000, dtype=torch.int32)  # as floats, denormals
    product = bits.view(torch.float32) * 1.0
    # Each thread takes a contiguous quarter, and flushes what it stores, or does not.
    print((product.view(torch.int32) != 0).view(4, -1).sum(1).tolist())


def test_denormals_are_flushed_on_every_thread(tmp_path: Path) -> None:
    assert said_by(say_denormals, tmp_path, False) == "[0, 0, 0, 0]"


def test_threads_older_than_the_setting_do_not_have_it(tmp_path: Path) -> None:
    """Why it must come before the first parallel operation; and that the test above would notice."""
    assert said_by(say_denormals, tmp_path, True) == f"[0, {1 << 20}, {1 << 20}, {1 << 20}]"


def say_faults(prepared: bool) -> None:
    """Whether memory is kept at last, and whether it was given back then."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(40 << 18)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    if prepared:
        prepare_processor(threads=1)
    settled = [faults() for _ in range(40)][-1]
    return_freed_memory()
    print(settled < 100, faults() > 1000)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are counted, and saved, on Linux")
def test_freed_memory_is_kept_until_it_is_given_back(tmp_path: Path) -> None:
    assert said_by(say_faults, tmp_path, False) == "False True"
    assert said_by(say_faults, tmp_path, True) == "True True"
