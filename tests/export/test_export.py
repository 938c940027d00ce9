"""Exported models: the same numbers as ours, through onnxruntime and torch.export."""

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from lm.config.groups import plugin_names
from lm.config.inference import ExportConfig
from lm.config.validate import default_values, make_config
from lm.data.text.vocabulary import Vocabulary
from lm.export.run import as_onnx, as_program
from lm.model.language_model import LanguageModel, build_model
from lm.system.tree import leaves
from tests.conftest import ROOT, TINY, Tiny, run_command
from tests.helpers.layers import zipf_counts
from tests.helpers.pages import blocks, commands
from tests.helpers.ways import CORES, INPUTS, MAXENT, TIED, TRANSFORMER, VARIANTS

PAGE = ROOT / "docs/export.md"

VOCABULARY = Vocabulary.from_counts([(f"w{i}", int(count)) for i, count in enumerate(zipf_counts(60))])
CLUSTERS = "output=adaptive output.cutoffs=[10,30] model.hidden_size=32"
CORES_OF_GRID = ["model=lstm", "model=gru", "model=rnn", f"{TRANSFORMER} model.memory=3"]
GRID = [f"{core} {output}" for core in CORES_OF_GRID for output in ("output=full", CLUSTERS, "output=hsm_freq")]
CUT = ("adaptive", "dsoftmax", "dsoftmax_star")
OTHERS = [
    f"{CLUSTERS} output.shortlist=false",
    f"{CLUSTERS} output.head_bias=true",
    "model.projection=4 model.layers=2",
]
OTHERS += [*CORES, *INPUTS, *TIED, *VARIANTS, "model=feedforward model.window=1"]
OTHERS += [f"output={name}" for name in plugin_names("output") if name not in (*CUT, "hsm_huffman")]
OTHERS += [f"output={name} output.cutoffs=[10,30] model.hidden_size=32" for name in CUT]
"""Every other core, input and output layer."""


def export_config(**settings: Any) -> ExportConfig:
    return make_config(default_values(ExportConfig) | {"checkpoint": "-", "out": "-", **settings}, ExportConfig)


def model_of(tiny: Tiny, way: str) -> LanguageModel:
    """An untrained model with weights large enough for peaked distributions."""
    model = build_model(tiny(*way.split()), VOCABULARY)
    with torch.no_grad():
        for parameter in model.output.parameters():
            parameter.mul_(4)
    return model.eval().requires_grad_(False)


def session_of(model: LanguageModel, **settings: Any) -> onnxruntime.InferenceSession:
    content = as_onnx(model, VOCABULARY, export_config(**settings))
    onnx.checker.check_model(onnx.load_from_string(content), full_check=True)
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("way", [*GRID, *(pytest.param(way, marks=pytest.mark.slow) for way in OTHERS)])
def test_three_calls_match(tiny: Tiny, way: str) -> None:
    """Calls of different lengths, with the state carried."""
    model = model_of(tiny, way)
    session = session_of(model)
    for streams in (1, 3):
        state = model.initial_state(streams)
        carried = {f"state_{i}": leaf.numpy() for i, leaf in enumerate(leaves(state))}
        for steps in (5, 1, 4):
            words_BT = torch.randint(len(VOCABULARY), (streams, steps))
            hidden_TBD, state = model(words_BT.t(), state)
            expected = model.output.log_prob(hidden_TBD).transpose(0, 1)
            log_probs, *new = session.run(None, {"ids": words_BT.numpy(), **carried})
            np.testing.assert_allclose(log_probs, expected.numpy(), rtol=0, atol=1e-4)
            carried = dict(zip(carried, new, strict=True))


def first_call(session: onnxruntime.InferenceSession, model: LanguageModel, **words: np.ndarray) -> list[np.ndarray]:
    state = {f"state_{i}": leaf.numpy() for i, leaf in enumerate(leaves(model.initial_state(2)))}
    return list(session.run(None, words | state))


def test_targets_and_topk_select_from_all(tiny: Tiny) -> None:
    model = model_of(tiny, CLUSTERS)
    ids, targets = np.random.default_rng(0).integers(0, len(VOCABULARY), (2, 2, 6))
    whole = first_call(session_of(model), model, ids=ids)[0]
    some = first_call(session_of(model, scores="targets"), model, ids=ids, targets=targets)[0]
    np.testing.assert_array_equal(some, np.take_along_axis(whole, targets[..., None], -1)[..., 0])
    best, top_ids, *_ = first_call(session_of(model, scores="topk", k=4), model, ids=ids)
    np.testing.assert_array_equal(best, -np.sort(-whole, axis=-1)[..., :4])
    np.testing.assert_array_equal(best, np.take_along_axis(whole, top_ids, -1))


@pytest.mark.parametrize("way", ["output=full model.hidden_size=64", CLUSTERS, TIED[1]])
def test_int8_is_close_and_small(tiny: Tiny, way: str) -> None:
    model = model_of(tiny, f"{way} model.embedding_size=64 model.hidden_size=64")
    ids = np.random.default_rng(0).integers(0, len(VOCABULARY), (2, 6))
    whole, small = (first_call(session_of(model, quantize=quantize), model, ids=ids)[0] for quantize in (None, "int8"))
    assert 0 < np.abs(whole - small).max() < 0.1
    np.testing.assert_allclose(np.exp(small).sum(-1), 1, rtol=1e-5)
    sizes = [len(as_onnx(model, VOCABULARY, export_config(quantize=quantize))) for quantize in (None, "int8")]
    assert sizes[1] < 0.45 * sizes[0]  # the graph itself takes a part of such a small model


@pytest.mark.slow
@pytest.mark.parametrize("way", [CLUSTERS, INPUTS[1], TRANSFORMER])
def test_torch_program_matches(tiny: Tiny, way: str) -> None:
    model = model_of(tiny, way)
    state, ids_B1 = model.initial_state(3), torch.tensor([[4], [0], [9]])
    hidden_1BD, after = model(ids_B1.t(), state)
    expected = model.output.log_prob(hidden_1BD).transpose(0, 1), *leaves(after)
    program = torch.export.load(io.BytesIO(as_program(model))).module()
    torch.testing.assert_close(program(ids_B1, *leaves(state)), expected)


def test_mistakes_are_explained(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*settings: str) -> str:
        done = run_command(tmp_path, "lm/export/__main__.py", f"checkpoint={tiny_run}", *settings, check=2)
        assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    os.mkfifo(tmp_path / "pipe")
    assert "out must name the file to write" in refused("out=pipe"), "nothing can be written next to it"
    (tmp_path / "pipe").unlink()
    assert "No such file or directory: " in refused("out=missing/model.onnx")
    assert "k must be from 1 to the vocabulary size" in refused("out=x.onnx", "scores=topk", "k=99")
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "lm.export.graph")
    assert "Try pip install onnx onnxruntime." in refused("out=x.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("way", "reason"), [("output=hsm_huffman", "no static graph"), (MAXENT[0], "model.maxent")])
def test_models_without_a_static_graph_are_refused(tmp_path: Path, way: str, reason: str) -> None:
    run_command(tmp_path, "train.py", *TINY, *way.split(), "trainer.max_steps=2", "run_dir=run")
    done = run_command(tmp_path, "lm/export/__main__.py", "checkpoint=run", "out=x.onnx", check=2)
    assert reason in done.stderr and not (tmp_path / "x.onnx").exists()


@pytest.mark.slow
def test_page_can_be_followed_without_torch(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/NAME").symlink_to(tiny_run)
    (tmp_path / "FILE").write_text("w000001 w000003 unheard w000002\n\n" + "w000004 w000001 " * 40 + "\n")
    for line in commands(PAGE):
        program, _, module, *settings = shlex.split(line)
        assert (program, module) == ("python", "lm.export")
        said = run_command(tmp_path, "lm/export/__main__.py", *settings).stdout
        assert Path(said.split()[-1]).suffixes == [".vocab", ".tsv"] and (tmp_path / said.split()[-1]).exists()
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[0], run_name='__main__')"
    (words,) = [block.text.split() for block in blocks(PAGE) if block.kind == "text"]
    assert words[0] == "python" and words[3:] == ["<", "FILE"]
    start = f"import sys; sys.argv = {[str(ROOT / words[1]), words[2]]!r}; {code}"
    text = (tmp_path / "FILE").read_text()
    done = subprocess.run([sys.executable, "-c", start], cwd=tmp_path, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    scored = run_command(tmp_path, "evaluate.py", "checkpoint=runs/NAME", "mode=score", "input=FILE").stdout
    expected = [line.split("\t")[:2] for line in scored.splitlines()]
    found = [line.split("\t") for line in done.stdout.splitlines()]
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected] == ["5", "1", "81"]
    np.testing.assert_allclose(*([float(each[0]) for each in lines] for lines in (found, expected)), atol=1e-3)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(next(block.text for block in blocks(PAGE) if block.kind == "python"), names)
    torch.testing.assert_close(names["log_probs"].exp().sum(-1), torch.ones(2, 1))
