"""`python -m lm.benchmark what=layers` on a toy: all figures, error messages."""

import json
from importlib import import_module

import numpy as np
import pytest
import torch

from lm.benchmark.__main__ import BENCHMARKS, main
from lm.benchmark.arguments import fill, split
from lm.benchmark.candidates import Workload, bare_products, layer_names, make_layer
from lm.benchmark.measure import STEP, WARM_UP, extra_peak_bytes, interleaved_medians
from lm.compare.paper import LAYERS

TOY = ["what=layers", "vocab=300", "cutoffs=20,100", "width=32", "tokens=40", "repeats=1"]


def test_a_toy_run_prints_a_table_and_writes_records(tmp_path, capsys):
    out = tmp_path / "benchmark.json"
    assert main([*TOY, "memory=false", f"out={out}"]) == 0
    table = capsys.readouterr().out
    records = json.loads(out.read_text())
    assert all(set(record) == {"name", "value", "unit", "ratio"} for record in records)
    names = {record["name"] for record in records}
    for layer in layer_names():
        assert f"\n{layer} " in table
        assert {f"layers/300/{layer}/time", f"layers/300/{layer}/share_of_products"} <= names
    assert {"layers/300/adaptive/speed_against_torch_adaptive", "layers/300/dsoftmax/speed_against_plain"} <= names


def test_real_counts_are_read_from_a_file(tmp_path, capsys):
    file = tmp_path / "counts.txt"
    np.savetxt(file, np.arange(500, 100, -1), fmt="%d")
    arguments = [*TOY, f"counts={file}", "layers=adaptive", "memory=false", f"out={tmp_path / 'b.json'}"]
    assert main(arguments) == 0
    assert "400 words" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "what must be one of: layers"),
        (["what=speed"], "got 'speed'"),
        (["layers"], "arguments have the form key=value; got 'layers'"),
        (["what=layers", "widht=3"], "Did you mean width?"),
        (["what=layers", "width=wide"], "width cannot be 'wide'. Try width=7"),
        (["what=layers", "layers=fool"], "layers must be of full"),
        (["what=layers", "counts=/nowhere"], "counts=/nowhere cannot be read"),
        (["what=layers", "vocab=100"], "output.cutoffs must increase"),
        (["what=layers", "repeats=0"], "repeats must be at least 1; got 0"),
    ],
    ids=str,
)
def test_mistakes_exit_with_two_and_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("what", BENCHMARKS)
def test_the_help_says_what_is_measured_and_its_settings_mean_the_defaults(what, capsys):
    module = import_module(f"lm.benchmark.{what}")
    with pytest.raises(SystemExit, match="0"):
        main([f"what={what}", "--help"])
    about, settings = capsys.readouterr().out.split("Settings and their defaults:\n")
    assert about.strip() == module.__doc__.strip()
    schemas = [getattr(module, name) for name in dir(module) if name.endswith("Settings") and name != "CountsSettings"]
    assert all(fill(schema, split(settings.split())) == schema() for schema in schemas)
    assert schemas


def test_medians_are_of_interleaved_rounds():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    medians = interleaved_medians(steps, repeats=3)
    assert order == list("ab" * 4) and set(medians) == {"a", "b"}


def test_every_layer_in_conf_is_compared_the_papers_in_its_order():
    assert layer_names()[: len(LAYERS)] == LAYERS


def multiplications(name, workload):
    return sum(len(a) * a.size(1) * b.size(1) for a, b in bare_products(name, workload).factors)


def test_bare_products_are_those_of_every_linear_map():
    """One product in the forward pass and two in the backward pass, for the tokens that need the map."""
    workload = Workload(np.maximum(1, 1000 // np.arange(1, 201)), [20, 80], 32, 100)
    for name in ("full", "dsoftmax", "dsoftmax_star"):
        weights = sum(p.numel() for p in make_layer(name, workload).parameters())
        assert multiplications(name, workload) == 3 * 100 * weights
    targets = workload.targets()
    first, second = int(((targets >= 20) & (targets < 80)).sum()), int((targets >= 80).sum())
    tails = first * (32 * 8 + 8 * 60) + second * (32 * 8 + 8 * 120)
    assert multiplications("adaptive", workload) == 3 * (100 * 22 * 32 + tails)
    for name in layer_names():
        if name == "hsm_huffman":  # a path is a few products of two vectors
            assert multiplications(name, workload) == 0
            continue
        assert 0 < multiplications(name, workload) <= 3 * 100 * (200 + 22) * (32 + 8)
        bare_products(name, workload).replay()()


def allocate(megabytes):
    return {WARM_UP: lambda: None, STEP: lambda: torch.ones(megabytes << 18).sum()}


@pytest.mark.slow
def test_extra_memory_is_what_the_step_allocates():
    peak = extra_peak_bytes(allocate, 50)
    assert peak is None or abs(peak / 2**20 - 50) < 5
