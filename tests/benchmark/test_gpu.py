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


@pytest.mark.slow
def test_the_tests_of_the_gpu_are_part_of_it(tmp_path, capsys):
    assert gpu.run_tests(tmp_path, marker="gpu")["ran"] is False
    (tmp_path / "tests").mkdir()
    lines = ["import pytest", "mark = pytest.mark.gpu", "", "@mark", "def test_one(): pass", "@mark"]
    lines += ["def test_two(): assert 3 == 4", "def test_other(): assert False"]
    (tmp_path / "tests/test_it.py").write_text("\n".join(lines))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    found = gpu.run_tests(tmp_path, marker="gpu")
    assert found["exit code"] == 1 and "1 failed, 1 passed" in found["summary"]
    assert "assert 3 == 4" in found["output"]
    assert "FAILED tests/test_it.py::test_two" in capsys.readouterr().out
