"""`what=step` and `what=training` on toys: all figures, and our step in parts is our step."""

import json

import pytest
import torch

from lm.benchmark import measure
from lm.benchmark.__main__ import main
from lm.benchmark.stacks import Parts, bare_products, make_trainer
from lm.benchmark.step import StepSettings, make_workload
from tests.helpers.forks import CONTEXT

TOY = ["what=step", "vocab=300", "cutoffs=20,100", "embedding=8", "width=64", "streams=4", "bptt=5", "repeats=1"]


@pytest.mark.parametrize(
    ("output", "naive"),
    [("adaptive", True), ("hsm_sim", False), pytest.param("full", True, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_toy_run_prints_tables_and_writes_records(output, naive, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure.multiprocessing, "get_context", lambda _: CONTEXT)  # started sooner than by `spawn`
    out = tmp_path / "benchmark.json"
    assert main([*TOY, f"output={output}", "memory=false", f"out={out}"]) == 0
    printed = capsys.readouterr().out
    records = {record["name"]: record for record in json.loads(out.read_text())}
    stacks = {name.split("/")[3] for name in records if name.endswith("/time")}
    assert stacks == {"ours", "products"} | ({"naive", "naive, fused"} if naive else set())
    for stack in stacks:
        assert records[f"step/300/{output}/{stack}/time"]["value"] > 0
        assert records[f"step/300/{output}/{stack}/of_peak"]["value"] > 0
    for part in ("loader", "embedding", "LSTM", "output", "clip and optimizer"):
        assert f"\n{part} " in printed
        assert records[f"step/300/{output}/parts/{part}"]["ratio"] > 0
    assert records[f"step/300/{output}/embedding update"]["ratio"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["what=step", "output=sample"], "output must be one of: full, sampled"),
        (["what=step", "streams=0"], "streams must be at least 1"),
        (["what=training", "rounds=0"], "rounds must be at least 1"),
        (["what=training", "trainer.thread=2"], "Did you mean trainer.threads"),
    ],
    ids=str,
)
def test_mistakes_exit_with_two_and_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_parts_make_up_the_trainers_step():
    """Cut into parts, the step ends with the weights of the uncut one."""
    workload = make_workload(StepSettings(vocab=300, cutoffs=[20, 100], embedding=8, width=64, streams=4, bptt=5))
    whole = make_trainer(workload)
    parts = Parts(workload)
    for batch in map(whole.loader().make, range(3)):
        whole.train_step(batch)
        parts()
    for (name, one), other in zip(whole.model.named_parameters(), parts.trainer.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert list(parts.seconds()) == ["loader", "embedding", "LSTM", "output", "clip and optimizer"]


def test_the_operations_of_a_step_are_those_of_its_definition():
    """Each linear map multiplies three times: forward, to its input, and to its weights."""
    sizes = {"vocab": 300, "embedding": 8, "width": 64, "streams": 4, "bptt": 5}
    workload = make_workload(StepSettings(output="full", cutoffs=[], **sizes))
    tokens, weights = 4 * 5, 4 * 64 * (8 + 64) + 64 * 300
    assert bare_products(workload).operations == 3 * 2 * tokens * weights


def test_real_training_is_compared_with_its_bare_steps(tmp_path, capsys):
    """Also over the end of an epoch, and beyond the limits of the run."""
    sizes = ["model.embedding_size=8", "model.hidden_size=12", "trainer.batch_size=4", "trainer.bptt=5"]
    data = ["data=zipf", "data.vocab_size=30", "data.tokens=2000", f"data.root={tmp_path}", "output=full"]
    arguments = [
        *sizes,
        *data,
        "trainer.threads=1",
        "trainer.log_every_steps=7",
        "steps=60",
        "rounds=1",
        "trainer.max_epochs=1",
    ]
    assert main(["what=training", *arguments, f"out={tmp_path / 'b.json'}"]) == 0
    assert "process time; best of 1 rounds of 60 steps" in capsys.readouterr().out
    assert all(record["ratio"] > 0 for record in json.loads((tmp_path / "b.json").read_text()))
