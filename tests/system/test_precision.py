"""Precision: reduced only in training, only on request, and never in evaluations."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from lm.system.devices import Precision, autocast, check_precision, disable_tf32, matmul_precision, precision_name
from tests.conftest import TINY, Command
from tests.helpers.emulated_cuda import emulated_cuda

CPU = torch.device("cpu")


def flags() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_tf32_is_allowed_only_in_training() -> None:
    before = flags()
    try:
        disable_tf32()
        assert flags() == ("highest", False)
        for precision in get_args(Precision):
            with pytest.raises(KeyError), matmul_precision(precision):
                expected = {"fp32": ("highest", False), "tf32": ("high", True), "bf16": ("highest", True)}
                assert flags() == expected[precision]
                raise KeyError
            assert flags() == ("highest", False), "also after an error"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("precision", get_args(Precision))
def test_only_bf16_autocasts_inside_the_context(precision: Precision) -> None:
    matrix = torch.randn(4, 4)
    with autocast(precision, CPU):
        assert (matrix @ matrix).dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert (matrix @ matrix).dtype == torch.float32


def test_tf32_is_not_reported_on_older_gpus() -> None:
    for capability, promised in (((7, 0), False), ((8, 0), True)):
        with emulated_cuda(capability=capability):
            name = precision_name("tf32", torch.device("cuda"))
        assert ("with TF32 products" in name) is promised
        assert ("no effect here" in name) is not promised


def test_each_precision_works_on_cpu() -> None:
    names = [precision_name(precision, CPU) for precision in get_args(Precision)]
    assert len(set(names)) == len(names)
    for precision in get_args(Precision):
        check_precision(precision, CPU)


def test_bf16_run_is_evaluated_in_float32(command: Command, workspace: Path) -> None:
    """So results agree to the last digit, even on machines without bfloat16."""
    command("train.py", *TINY, "run_dir=run", "trainer.precision=bf16")
    command("evaluate.py", "checkpoint=run")
    summary = json.loads((workspace / "run/summary.json").read_text())
    evaluation = json.loads((workspace / "run/evaluation-step-40.json").read_text())
    assert evaluation["splits"]["test"]["perplexity"] == pytest.approx(summary["test"]["last"], rel=1e-6)
    weights = torch.load(workspace / "run/checkpoints/last.pt", weights_only=True)
    kept = [*weights["model"].values(), *(part for layer in weights["state"] for part in layer)]
    assert all(tensor.dtype == torch.float32 for tensor in kept)


def test_resume_keeps_precision(command: Command) -> None:
    command("train.py", *TINY, "run_dir=run")
    for change in ("trainer.precision=bf16", "trainer.micro_batches=2"):
        done = command("train.py", "resume=run", change, check=2)
        assert change.split("=")[0] in done.stderr
    done = command("train.py", *TINY, "trainer.precision=fp16", check=2)
    assert "trainer.precision must be one of fp32, tf32, bf16; got 'fp16'" in done.stderr
