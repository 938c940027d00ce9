"""The presets of the paper's Table 2: each can be dry-run and trained."""

from pathlib import Path

import pytest

from tests.conftest import run_command

PRESETS = ["irnn", "feedforward", "lstm_2048_512", "char_cnn", "maxent"]
SMALLER = """data=zipf data.vocab_size=300 data.tokens=3000 model.hidden_size=64 model.embedding_size=32
    output.cost_model=flops trainer.batch_size=8 trainer.bptt=5 trainer.max_steps=3 optim.lr=0.001 trainer.threads=1
    run_dir=run""".split()  # noqa: SIM905
NARROWER = {
    "lstm_2048_512": ["model.projection=32"],
    "char_cnn": ["model.projection=32", "input.filters=[4,8]"],
    "maxent": ["model.maxent.size=100000"],
}


@pytest.mark.parametrize("preset", [pytest.param(name, marks=pytest.mark.slow) for name in PRESETS])
def test_preset_trains(preset: str, workspace: Path) -> None:
    settings = [f"experiment=one_billion_word_{preset}", *SMALLER, *NARROWER.get(preset, [])]
    if preset == "maxent":  # its layer has no clusters
        settings.remove("output.cost_model=flops")
    if preset == "char_cnn":
        shown = run_command(workspace, "train.py", *settings, "trainer.dry_run=true").stdout
        assert "hidden 5 x 8" in shown
    assert "Test perplexity" in run_command(workspace, "train.py", *settings).stdout
