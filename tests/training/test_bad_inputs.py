"""Extreme settings, damaged corpora and damaged checkpoints quickly exit with code 2 and one paragraph."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.data.corpus import Corpus
from lm.system import checkpoint
from lm.training.setup import automatic_clusters
from tests.conftest import TINY, run_command

SMALL = [word for word in TINY if not word.startswith("output")]


@pytest.fixture
def place(tiny_run: Path) -> Path:
    """The folder of a run and its corpus."""
    return tiny_run.parent


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optim.lr=100", "diverged"),
        ("optim.lr=1e23", "Try optim.lr=0.1"),
        ("output=sampled output.sample_fraction=1e6", "at most 1; got 1000000.0"),
        ("model=lstm model.layers=1000000", "model.layers must be a whole number, at least 1 and at most 1000"),
        ("model.hidden_size=9223372036854775808", "model.hidden_size must be a whole number, at least 1 and at most"),
        ("optim.lr=1e39 optim.weight_decay=0", "optim.lr must be a number, above 0; got 1e+39. Numbers are from 1e-30"),
        ("trainer.max_seconds=1e-200", "or null; got 1e-200. Numbers are from 1e-30 to 1e30"),
        ("model=scrn model.context_size=100000000000", "at most 1e+09; got 100000000000"),
        ("model=feedforward model.window=9223372036854775807", "whole ones at most 2^53. Try model.window=5"),
        ("input=char_cnn input.byte_size=9223372036854775808", "Try input.byte_size=16"),
        ("seed=18446744073709551616", "got 18446744073709551616. Numbers are"),
        ("optim.lr=1" + "0" * 400, "optim.lr must be a number"),
        ("model.hidden_size=900000000", "more bytes than can be counted"),
        ("data.root=", "data.root must name a folder; got nothing"),
        ("output=hsm_freq output.num_classes=99999", "output.num_classes must be from 1 to the vocabulary size (32)"),
        ("data.tokens=100000000000000", "data.tokens=100000000000000 needs"),
        (
            "data=pydoc data.tokenizer=sentencepiece data.vocab_size=1",
            "data.vocab_size must be a whole number, at least",
        ),
    ],
)
def test_extreme_settings_raise(place: Path, overrides: str, message: str) -> None:
    words = overrides.split()
    given = SMALL if overrides.startswith("output") else TINY if "pydoc" not in overrides else []
    done = run_command(place, "train.py", *given, *words, check=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_text_too_small_for_subwords_raises(place: Path) -> None:
    done = run_command(
        place, "lm/prepare.py", "data=pydoc", "data.tokenizer=sentencepiece", "data.vocab_size=3", check=2
    )
    assert "data.vocab_size must be at least" in done.stderr


def test_blocks_are_timed_at_training_size(tiny: Callable[..., Any], place: Path) -> None:
    """Streams have 500 tokens, so larger `trainer.bptt` values are capped."""
    given = ("output=adaptive", "output.cost_model=flops", "data.tokens=2000")
    (meta,) = (place / "data").glob("*/meta.json")
    corpus = Corpus.open(meta.parent)
    device: Any = "cpu"
    of = [automatic_clusters(tiny(*given, f"trainer.bptt={bptt}"), corpus, device=device) for bptt in (500, 100_000)]
    assert of[0].full_seconds == of[1].full_seconds


@pytest.mark.parametrize("key", ["corpus", "progress", "vocabulary", "optimizer"])
def test_checkpoint_missing_a_key_raises(place: Path, tmp_path: Path, key: str) -> None:
    content = checkpoint.load(place / "run/checkpoints/last.pt")
    del content["format"]
    checkpoint.save({**content, key: None}, tmp_path / "bad.pt")
    done = run_command(place, "evaluate.py", f"checkpoint={tmp_path}/bad.pt", check=2)
    assert "bad.pt is damaged" in done.stderr


def not_finite(content: dict[str, Any]) -> None:
    content["model"] = {name: weight * torch.nan for name, weight in content["model"].items()}


def sparse(content: dict[str, Any]) -> None:
    content["model"] = {name: weight.to_sparse() for name, weight in content["model"].items()}


def far_ahead(content: dict[str, Any]) -> None:
    content["progress"]["step"] = 1 << 70


@pytest.mark.parametrize(
    ("damage", "message", "words"),
    [
        (not_finite, "must be finite; got NaN", ["lm/generate.py", "checkpoint=run"]),
        (not_finite, "must be finite; got NaN", ["evaluate.py", "checkpoint=run"]),
        (sparse, "does not fit the settings it carries", ["lm/generate.py", "checkpoint=run"]),
        (sparse, "does not fit the settings it carries", ["evaluate.py", "checkpoint=run"]),
        (far_ahead, "is damaged", ["train.py", "resume=run", "trainer.max_steps=60"]),
    ],
)
def test_weights_and_steps_that_training_cannot_write_raise(
    place: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str, words: list[str]
) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    content = torch.load(place / "run/checkpoints/last.pt", weights_only=True)
    damage(content)
    torch.save(content, tmp_path / "run/checkpoints/last.pt")
    assert message in run_command(tmp_path, *words, check=2).stderr
