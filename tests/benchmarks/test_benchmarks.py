"""Every benchmark at toy size: tables, records, exit codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import clusters, gpu, growth, harness, layers, step
from benchmarks.workloads import Workload, layer_flops, make_layer, make_trainer, step_flops
from lm.config.groups import plugin_names
from lm.output.clusters import cost_model
from lm.output.clusters.choice import ClusterCosts
from lm.output.clusters.cost_model import flops_model
from lm.output.clusters.partition import check_cutoffs
from tests.helpers.forks import CONTEXT

SIZES = ["--vocab", "300", "--cutoffs", "20,100", "--width", "64", "--embedding", "8", "--streams", "4", "--bptt", "5"]
TOY = [*SIZES, "--repeats", "1"]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results file; child processes are forked, which is faster than spawning."""
    monkeypatch.setattr(harness.multiprocessing, "get_context", lambda _: CONTEXT)
    monkeypatch.setattr(cost_model, "SECONDS", 0.1)
    return tmp_path / "benchmark.json"


def records(out: Path) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(out.read_text())
    return result


def toy_workload(*words: str) -> Workload:
    arguments = harness.sized_parser(None).parse_args([*TOY, *words])
    return Workload.from_arguments(arguments)


@pytest.mark.parametrize("output", ["adaptive", pytest.param("hsm_sim", marks=pytest.mark.slow)])
def test_step_compares_stacks_and_prints_parts(output: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step.main([*TOY, "--output", output, "--no-memory", "--out", str(out)])
    printed = capsys.readouterr().out
    assert [r["step"] for r in records(out)] == ["ours"] + (
        ["PyTorch, default", "PyTorch, tuned"] if output != "hsm_sim" else []
    )
    assert all(r["ms"] > 0 and r["of peak"] > 0 for r in records(out))
    for part in ("loader", "embedding", "core", "output", "clip and optimizer"):
        assert f"\n{part} " in printed


def test_parts_equal_trainer_step() -> None:
    whole, parts = make_trainer(toy_workload()), step.Parts(toy_workload())
    for batch in map(whole.batches().make, range(3)):
        whole.step(batch)
        parts()
    for (name, one), other in zip(whole.model.named_parameters(), parts.trainer.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_step_flops_match_definition() -> None:
    """Three matmuls for each linear map: forward, and for the gradients of its input and its weights."""
    tokens, weights = 4 * 5, 4 * 64 * (8 + 64) + 64 * 300
    assert step_flops(toy_workload("--cutoffs", "").using("output", "full")) == 3 * 2 * tokens * weights


def test_layer_matmuls_cover_every_linear_map() -> None:
    """Three matmuls for each map, over the tokens that need it."""
    workload, tokens = toy_workload(), 4 * 5
    for name in ("full", "dsoftmax", "dsoftmax_star"):
        weights = sum(p.numel() for p in make_layer(workload.using("output", name)).parameters())
        assert layer_flops(workload.using("output", name)) == 3 * 2 * tokens * weights
    targets = workload.targets()
    first, second = int(((targets >= 20) & (targets < 100)).sum()), int((targets >= 100).sum())
    tails = first * (64 * 16 + 16 * 80) + second * (64 * 16 + 16 * 200)
    assert layer_flops(workload) == 3 * 2 * (tokens * 22 * 64 + tails)


def test_layers_compares_every_output_layer(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers.main([*TOY, "--out", str(out)])
    rows = {r["layer"]: r for r in records(out)}
    assert set(plugin_names("output")) <= set(rows)
    assert all(row["ms"] > 0 and row["x full"] > 0 for row in rows.values())
    assert rows["adaptive"]["x torch"] > 0
    assert "\nadaptive " in capsys.readouterr().out


@pytest.mark.parametrize(("group", "column"), [pytest.param("model", "core", marks=pytest.mark.slow), ("input",) * 2])
def test_layers_compares_every_core_and_input(group: str, column: str, out: Path) -> None:
    layers.main([*TOY, "--group", group, "--out", str(out)])
    assert [r[column] for r in records(out)] == plugin_names(group)
    assert all(r["step ms"] > 0 for r in records(out))


def test_counts_from_file(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = out.with_name("counts.txt")
    np.savetxt(counts, np.arange(500, 100, -1), fmt="%d")
    words = ["--counts", str(counts), "--layers", "adaptive", "--out", str(out)]
    layers.main([*TOY, *words])
    assert "400 words" in capsys.readouterr().out


def toy_bench() -> clusters.Bench:
    workload = toy_workload("--cutoffs", "")
    costs = ClusterCosts(workload.counts, 64, 20, flops_model([64, 16]))
    return clusters.Bench(workload, costs, lambda steps: dict.fromkeys(steps, 1.0))


def test_clusters_compares_and_draws(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out.parent)
    clusters.main([*TOY, "--out", str(out)])
    assert "Spearman" in capsys.readouterr().out
    compared = [r for r in records(out) if "x automatic" in r]
    *fixed, given, automatic = compared
    assert (given["clusters"], automatic["clusters"], automatic["x automatic"]) == ("given", "automatic", 1)
    assert fixed and all(r["measured ms"] > 0 for r in compared)
    for name in ("figure_1", "figure_2", "figure_3"):
        assert "</svg>" in out.with_suffix(f".{name}.svg").read_text()


@pytest.mark.parametrize("automatic", [[20], [20, 60], [20, 60, 200]])
def test_fixed_choices_have_the_head_of_the_automatic_one(automatic: list[int]) -> None:
    fixed = clusters.fixed_choices(automatic, toy_bench())
    assert len({tuple(cutoffs) for cutoffs in fixed}) == len(fixed) == (1 if len(automatic) == 1 else 20)
    for cutoffs in fixed:
        assert check_cutoffs(cutoffs, vocab_size=300) == cutoffs
        assert cutoffs[0] == 20 and len(cutoffs) == len(automatic)


def test_figure_3_predicts_twenty_tails_by_both_objectives() -> None:
    curves = clusters.num_clusters(toy_bench())
    for label in ("paper's objective", "predicted"):
        assert [tails for tails, _ in curves[label]] == list(range(1, 21))


def test_misses_names_worst_point() -> None:
    curves = {"measured": [(10, 2.0), (100, 4.0), (1000, 8.0)], "predicted": [(10, 2.0), (100, 3.0), (1000, 8.8)]}
    assert clusters.misses(curves) == "prediction 12% off; -25% at 100"


def test_spearman() -> None:
    assert clusters.spearman([1, 2, 3, 4], [10, 20, 25, 1e9]) == pytest.approx(1)
    assert clusters.spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


@pytest.mark.slow
def test_growth_measures_every_layer_and_vocabulary(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out.parent)
    growth.main([*TOY, "--vocabularies", "100,200", "--out", str(out)])
    assert [(r["layer"], r["words"]) for r in records(out)] == [(n, v) for v in (100, 200) for n in growth.LAYERS]
    assert "</svg>" in out.with_suffix(".svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("cuda")
def test_gpu_report_continues_after_failed_part(device: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":  # an emulated one has no profiler, and its blocks would grow for minutes
        monkeypatch.setattr(gpu, "count_launches", lambda *_: None)
        monkeypatch.setattr(gpu, "compare_clusters", lambda *_: {"clusters": [{}] * 14})
    monkeypatch.setitem(gpu.SIZES, "toy", (*gpu.SIZES["toy"][:3], ["adaptive", "no_such_layer"]))
    monkeypatch.setattr(gpu, "precisions", lambda _: ["bf16"])
    monkeypatch.setattr(gpu, "STREAMS", (8,))
    monkeypatch.setattr(gpu, "EXCHANGED", 8)
    monkeypatch.setitem(gpu.PEAK_SIZES, "cuda", 64)
    words = ["--device", device, "--sizes", "toy", "--repeats", "1", "--no-tests", "--out", str(out)]
    gpu.main(words)
    report = json.loads(out.read_text())
    assert report["machine"]["torch"] == torch.__version__
    row = report["toy/bf16/adaptive"]
    assert all(row[key] > 0 for key in ("layer ms", "step ms", "host ms", "loop ms", "tokens/s"))
    assert row["equal bits"] == "True"
    assert {"core", "output"} < {part["part of our step"] for part in report["toy/bf16/parts"]}
    assert ("toy/bf16/adaptive, 8 streams" in report) == (device == "cuda")
    assert len(report["toy/bf16/clusters"]["clusters"]) == 14
    # The emulated device has neither NCCL nor sparse gradients.
    missing = {"all-reduce GB/s", "toy/bf16/PyTorch, tuned"}
    assert set(report["problems"]) - missing == {"toy/bf16/no_such_layer"}


def test_gpu_error_is_written_and_report_continues(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "machine", lambda _: {})
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    report = gpu.Report(str(out), torch.device("cuda"))
    assert report.add("one", fail) is None
    assert report.add("two", lambda: 2) == 2
    written = json.loads(out.read_text())
    assert "illegal memory access" in written["problems"]["one"] and written["two"] == 2


@pytest.mark.slow
def test_gpu_report_runs_marked_tests(tmp_path: Path) -> None:
    assert "not run" in gpu.run_tests(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    test = "import pytest\ndef test_other(): assert False\n@pytest.mark.gpu\ndef test_one(): assert {}\n"
    (tmp_path / "tests/test_it.py").write_text(test.format(True))
    assert "1 passed" in gpu.run_tests(tmp_path)
    (tmp_path / "tests/test_it.py").write_text(test.format(False))
    with pytest.raises(RuntimeError, match="exit code 1"):
        gpu.run_tests(tmp_path)


@pytest.mark.parametrize(
    ("benchmark", "words", "key"),
    [
        (step, ["--output", "sample"], "--output"),
        (step, ["--streams", "0"], "--streams"),
        (layers, ["--widht", "3"], "--widht"),
        (layers, ["--width", "wide"], "--width"),
        (layers, ["--layers", "fool"], "--layers"),
        (layers, ["--counts", "/nowhere"], "--counts"),
        (layers, ["--vocab", "100"], "output.cutoffs"),
        (clusters, ["--cutoffs", "100,20"], "output.cutoffs"),
        (gpu, ["--sizes", "huge"], "--sizes"),
        (gpu, ["--device", "cuda:77"], "--device"),
        (gpu, ["--device", "cpu", "--out", "/nope/x.json"], "--out"),
    ],
)
def test_mistake_exits_with_two(benchmark: Any, words: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        benchmark.main(words)
    assert ending.value.code == 2 and key in capsys.readouterr().err


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    medians = harness.interleaved_medians({name: lambda name=name: order.append(name) for name in "ab"}, repeats=3)  # type: ignore[misc]
    assert order == list("ab" * 4) and set(medians) == {"a", "b"}


def allocate(megabytes: int) -> harness.Step:
    return lambda: torch.ones(megabytes << 18).sum()


@pytest.mark.slow
def test_peak_memory_of_a_step() -> None:
    peak = harness.peak_mib(allocate, 50)
    assert peak is None or abs(peak - 50) < 10
