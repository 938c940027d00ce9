"""Runs with `output.cutoffs=auto`: clusters are chosen once, reported, and reused by resume and evaluate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lm.training.setup
from lm.output.clusters.cost_model import flops_model, save_model
from lm.training.metrics import read_metrics
from tests.conftest import TINY, Command

AUTO = [*TINY, "output=adaptive", "output.cost_model=flops", "data.vocab_size=200", "model.hidden_size=32"]


def cutoffs_of(run: Path) -> dict[str, Any]:
    """Return the cutoffs stored in each of the run's files."""
    content = torch.load(run / "checkpoints/last.pt", weights_only=True)
    summary = json.loads((run / "summary.json").read_text())
    return {
        "config": OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))["output"]["cutoffs"],
        "checkpoint": content["config"]["output"]["cutoffs"],
        "explanation": content["clusters"]["cutoffs"],
        "summary": summary["output"]["predicted"]["cutoffs"],
    }


def test_run_reports_and_stores_chosen_clusters(command: Command, workspace: Path) -> None:
    done = command("train.py", *AUTO, "run_dir=run")
    run = workspace / "run"
    first, *others = cutoffs_of(run).values()
    assert first and all(other == first for other in others)
    assert f"cutoffs {first}: output layer predicted" in done.stdout
    assert "times as fast as the full softmax (counted flops" in done.stdout
    assert all(f"\n{name}" in done.stdout for name in ("cluster ", "head ", "tail 1 "))
    events = EventAccumulator(str(run))
    events.Reload()
    clusters = range(len(first) + 1)
    wanted = {f"6_output/cluster_{c}/{figure}" for c in clusters for figure in ("loss", "share")}
    assert wanted <= set(events.Tags()["scalars"])
    last = [record for record in read_metrics(run) if "valid/ppl" in record][-1]
    assert sum(last[f"output/cluster_{c}/share"] for c in clusters) == pytest.approx(1)


def test_resume_and_evaluate_keep_chosen_clusters(
    command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`resume=auto` finds the run although its config now has a list of cutoffs instead of `auto`."""
    command("train.py", *AUTO)
    (run,) = (workspace / "runs").iterdir()
    chosen = cutoffs_of(run)
    (run / "summary.json").unlink()  # as if the run had been stopped
    monkeypatch.setattr(lm.training.setup, "choose_clusters", lambda *_, **__: pytest.fail("chosen again"))
    done = command("train.py", *AUTO, "resume=auto", "trainer.max_steps=60")
    assert "resumed  at step 40" in done.stdout
    assert "predicted ms" in done.stdout
    assert cutoffs_of(run) == chosen
    command("train.py", f"resume={run}", "trainer.max_steps=70")
    assert cutoffs_of(run) == chosen
    assert "perplexity" in command("evaluate.py", f"checkpoint={run}").stdout


def test_all_clustered_layers_use_the_same_partition(command: Command, workspace: Path) -> None:
    clusters = ["output.num_tails=2", "output.head_coverage=0.7"]
    for layer in ("adaptive", "dsoftmax", "dsoftmax_star"):
        command("train.py", *AUTO, f"output={layer}", *clusters, f"run_dir={layer}", "trainer.max_steps=3")
    partitions = [cutoffs_of(workspace / layer)["config"] for layer in ("adaptive", "dsoftmax", "dsoftmax_star")]
    assert partitions[0] == partitions[1] == partitions[2]
    assert len(partitions[0]) == 2


def test_dsoftmax_cluster_count_is_limited_by_width(command: Command, workspace: Path) -> None:
    command("train.py", *AUTO, "output=dsoftmax", "run_dir=run", "model.hidden_size=12", "trainer.max_steps=3")
    assert len(cutoffs_of(workspace / "run")["config"]) == 1


@pytest.mark.parametrize(
    ("layer", "num_words"),
    [
        *(("adaptive", number) for number in (1, 2, 10)),
        *((layer, 1) for layer in ("dsoftmax", "dsoftmax_star")),
        # The same partition as the adaptive softmax.
        *(pytest.param(la, n, marks=pytest.mark.slow) for la in ("dsoftmax", "dsoftmax_star") for n in (2, 10)),
    ],
)
def test_smallest_vocabularies_train(command: Command, workspace: Path, layer: str, num_words: int) -> None:
    (workspace / "text").mkdir()
    line = " ".join(f"w{i}" for i in range(num_words) for _ in range(num_words - i)) + "\n"
    for split in ("train", "valid", "test"):
        (workspace / "text" / f"{split}.txt").write_text(line * 60)
    settings = [setting for setting in AUTO if not setting.startswith(("data", "output=", "trainer.max_steps"))]
    command(
        "train.py", *settings, "data=text", "data.dir=text", f"output={layer}", "run_dir=run", "trainer.max_steps=5"
    )
    summary = json.loads((workspace / "run/summary.json").read_text())
    assert 1 <= summary["test"]["last"] < 1000
    command("evaluate.py", "checkpoint=run")


def test_saved_cost_model_is_used_and_another_file_raises(command: Command, workspace: Path) -> None:
    save_model(flops_model([32, 8]), workspace / "model.json")
    (workspace / "bad.json").write_text("{}")
    done = command("train.py", *AUTO, "output.cost_model=model.json", "run_dir=run", "trainer.max_steps=3")
    assert "saved in model.json" in done.stdout
    for path in ("bad.json", "nowhere.json"):
        done = command("train.py", *AUTO, f"output.cost_model={path}", "run_dir=other", check=2)
        assert done.stderr.startswith("output.cost_model must") and path in done.stderr
        assert "Traceback" not in done.stderr
        assert not (workspace / "other").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["output.num_tails=199"], "output.num_tails must leave a word for each tail"),
        (["output=dsoftmax", "output.num_tails=3"], "at most 2 tails; got 3"),
    ],
    ids=str,
)
def test_impossible_settings_raise(command: Command, workspace: Path, settings: list[str], message: str) -> None:
    done = command("train.py", *AUTO, *settings, "run_dir=run", check=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (workspace / "run").exists()
