"""What a process sets for its threads and its memory; each test in a process of its own, because it lasts."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


def run(code: str) -> str:
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return child.stdout.strip()


DENORMALS = """
import torch
from lm.processor import prepare_processor
{before}
prepare_processor(threads=4)
bits = torch.full((1 << 22,), 1000, dtype=torch.int32)  # as floats, denormals
product = bits.view(torch.float32) * 1.0
# Each thread takes a contiguous quarter, and flushes what it stores, or does not.
print((product.view(torch.int32) != 0).view(4, -1).sum(1).tolist())
"""


def test_denormals_are_flushed_on_every_thread() -> None:
    assert run(DENORMALS.format(before="")) == "[0, 0, 0, 0]"


def test_threads_older_than_the_setting_do_not_have_it() -> None:
    """Why it must come before the first parallel operation; and that the test above would notice."""
    before = "torch.set_num_threads(4); torch.ones(1 << 22).mul(1.0)"
    assert run(DENORMALS.format(before=before)) == f"[0, {1 << 20}, {1 << 20}, {1 << 20}]"


FAULTS = """
import resource, torch
from lm.processor import prepare_processor, return_freed_memory
{before}

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(40 << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

settled = [faults() for _ in range(40)][-1]
return_freed_memory()
print(settled < 100, faults() > 1000)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are counted, and saved, on Linux")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    assert run(FAULTS.format(before="")) == "False True"
    assert run(FAULTS.format(before="prepare_processor(threads=1)")) == "True True"
