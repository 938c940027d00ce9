"""`what=gpu` at toy size on a CPU: every part of the report, also where one fails."""

import json

import pytest
import torch

from lm.benchmark import gpu
from lm.benchmark.__main__ import main
from lm.output.clusters import cost_model

TOY = ["what=gpu", "device=cpu", "sizes=toy", "steps=1", "tests=false"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_what_to_try(capsys):
    assert main(["what=gpu"]) == 2
    message = capsys.readouterr().err
    assert "what=gpu reports on a GPU, and none is available" in message and "device=cpu sizes=toy" in message
    assert message.count("\n") == 1


def test_an_unknown_size_is_refused(capsys):
    assert main(["what=gpu", "device=cpu", "sizes=huge"]) == 2
    assert "sizes must be of text8, one_billion_word, toy; got 'huge'" in capsys.readouterr().err


def test_a_toy_report_holds_every_part_though_one_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(gpu.SIZES, "toy", gpu.SIZES["toy"]._replace(layers=("adaptive", "no_such_layer")))
    monkeypatch.setattr(gpu, "precisions", lambda _: [gpu.Precision.bf16])
    monkeypatch.setattr(cost_model, "SECONDS", 0.1)
    out = tmp_path / "gpu.json"
    assert main([*TOY, f"out={out}"]) == 0
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert report["machine"]["torch"] == torch.__version__
    found = report["toy/bf16/adaptive"]
    assert all(found[key] > 0 for key in ("layer ms", "step ms", "host ms", "tokens/s", "launches", "peak GiB"))
    assert found["tokens/s"] == pytest.approx(20_000 / found["step ms"])
    assert 0 < found["of peak"] < 1
    measured = [row for row in report["toy/bf16/clusters"]["rows"] if row["name"].endswith("/measured")]
    assert len(measured) == 14 and all(row["value"] > 0 for row in measured)
    assert len(report["toy/bf16/clusters"]["cost model"]["blocks"]) == 4
    assert list(report["problems"]) == ["toy/bf16/no_such_layer"]
    assert "\ntoy   bf16       adaptive " in printed and "1 problem too" in printed


def test_an_error_that_stays_with_the_gpu_is_on_disk_and_the_rest_goes_on(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "machine", lambda _: {})
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    report = gpu.Report(str(tmp_path / "gpu.json"), torch.device("cuda"))
    assert report.add("one", fail) is None
    assert report.add("two", lambda: 2) == 2
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert "illegal memory access" in written["problems"]["one"] and written["two"] == 2


@pytest.mark.slow
def test_the_tests_of_the_gpu_are_part_of_it(tmp_path, capsys):
    assert gpu.run_tests(tmp_path, marker="gpu")["ran"] is False
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")

    def report_on(*bodies):
        """A passing test without the marker, and one with it for each body."""
        tests = [f"@pytest.mark.gpu\ndef test_{number}():\n    {body}\n" for number, body in enumerate(bodies)]
        lines = ["import os, pytest", "def test_other(): pass", *tests]
        (tmp_path / "tests/test_it.py").write_text("\n".join(lines))
        report = gpu.Report(str(tmp_path / "gpu.json"), torch.device("cpu"))
        found = report.add("tests", lambda: gpu.run_tests(tmp_path, marker="gpu"))
        return found, report.problems.get("tests", "")

    found, problem = report_on("pass")
    assert "1 passed" in found["summary"] and not problem
    found, problem = report_on("pass", "assert 3 == 4")
    assert found is None and "exit code 1\nFAILED tests/test_it.py::test_1" in problem
    assert "E   assert 3 == 4" in problem and "1 failed, 1 passed" in problem
    assert "FAILED tests/test_it.py::test_1" in capsys.readouterr().out
    assert "exit code -6" in report_on("os.abort()")[1], "a crash"
    assert "exit code 5" in report_on()[1], "no test was found"
