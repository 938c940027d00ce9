"""A dry run describes a run without creating its directory."""

import re
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, Command


@pytest.mark.parametrize("way", ["output=hsm_sim", "trainer.micro_batches=2 trainer.precision=bf16 model.layers=2"])
def test_dry_run_prints_shapes_memory_time(command: Command, workspace: Path, way: str) -> None:
    done = command("train.py", *TINY, *way.split(), "trainer.dry_run=true")
    assert sorted(path.name for path in workspace.iterdir()) == ["data"]
    assert not list(workspace.glob("data/*/brown*")), "no Brown classes are computed"
    assert "run      none: trainer.dry_run=true" in done.stdout
    assert re.search(r"input\.weight +32 x 8 +256 ", done.stdout)
    assert re.search(r"step     5 x 4 words.* -> embedded 5 x 4 x 8 -> hidden 5 x 4 x 12 -> loss", done.stdout)
    assert "epoch    100 steps, 2,000 tokens" in done.stdout
    assert re.search(r"memory   about [\d.]+ MiB: parameters .* MiB, optimizer .* MiB, step .* MiB", done.stdout)
    assert re.search(r"ms a step, [\d,]+ tokens/s; about \d+s of training", done.stdout)
    listed = re.findall(r"^\S+ +[\dx ]+  ([\d,]+) +[\d.]+ MiB$", done.stdout, re.M)
    total = re.search(r"model +([\d,]+) parameters", done.stdout)
    assert total is not None
    assert sum(int(number.replace(",", "")) for number in listed) == int(total[1].replace(",", ""))


def test_dry_run_respects_max_seconds(command: Command) -> None:
    done = command("train.py", *TINY, "trainer.dry_run=true", "trainer.max_steps=null", "trainer.max_seconds=7200")
    assert "about 2h00m of training" in done.stdout


def test_dry_run_rejects_resume(command: Command) -> None:
    done = command("train.py", *TINY, "trainer.dry_run=true", "resume=auto", check=2)
    assert "trainer.dry_run=true needs a new run; got resume=auto" in done.stderr


def test_opening_has_device_precision_corpus_oov(command: Command) -> None:
    done = command("train.py", *TINY, "run_dir=run", "trainer.precision=tf32", "trainer.max_steps=2")
    assert re.search(r"^corpus   .*\n.*2,000 training tokens, 32 words, 0.0% of the validation text", done.stdout, re.M)
    assert re.search(
        rf"^device   cpu \(1 thread, .*\), torch {re.escape(torch.__version__)}, float32", done.stdout, re.M
    )
    assert "tf32 needs a GPU of compute capability 8.0 or higher; no effect here" in done.stdout
