"""A folder of runs in TensorBoard, queried over HTTP."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lm.config.groups import plugin_names
from lm.config.validate import flatten
from lm.system.errors import in_words
from lm.training.metrics import read_metrics
from lm.training.profiling import TRACED
from lm.training.tensorboard import BY_SECOND, LAYOUT, METRICS, NUMBERS, SHOWN_FIRST, WORDS, Events, drawn_as
from tests.conftest import TINY, Command, run_command

CHARTS = list(LAYOUT["comparison"])
LAYERS = ("full", "hsm_freq", "adaptive")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny runs of a few layers, one of them resumed."""
    folder = tmp_path_factory.mktemp("tensorboard")
    evaluated = [*(setting for setting in TINY if setting != "output=full"), "trainer.eval_every_steps=10"]
    for layer in LAYERS:
        flops = ["output.cost_model=flops"] if layer == "adaptive" else []
        run_command(folder, "train.py", *evaluated, f"output={layer}", *flops, f"run_dir=runs/{layer}")
    run_command(folder, "train.py", "resume=runs/adaptive", "trainer.max_steps=60")
    run_command(folder, "evaluate.py", "checkpoint=runs/adaptive", "mode=projector", "words=20")
    return folder / "runs"


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    """URL of a TensorBoard server that has loaded all runs."""
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={runs}", "--port=0", "--load_fast=false"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+:\d+/", line)))
        for _ in range(300):  # it answers before it has read its folder
            if len(ask(address, "data/runs")) == len(LAYERS):
                break
            time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


def ask(url: str, path: str, *, body: dict[str, Any] | None = None, **query: str) -> Any:
    address = f"{url}{path}?{urllib.parse.urlencode(query)}" if query else f"{url}{path}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        content = answer.read()
    return json.loads(content) if answer.headers.get_content_type() == "application/json" else content


def test_all_runs_share_one_layout(url: str) -> None:
    (category,) = ask(url, "data/plugin/custom_scalars/layout")["category"]
    assert [chart["title"] for chart in category["chart"]] == CHARTS
    for chart, tag in zip(category["chart"], (BY_SECOND, "1_valid/ppl", "3_train/ppl"), strict=False):
        (pattern,) = chart["multiline"]["tag"]
        found = ask(url, "data/plugin/custom_scalars/scalars", run="full", tag=pattern)["tag_to_events"]
        assert list(found) == [tag], "one curve per run"


def test_validation_comes_first(url: str, runs: Path) -> None:
    """TensorBoard sorts groups of curves by name."""
    tags = sorted(ask(url, "data/plugin/scalars/tags")["adaptive"])
    groups = [tag.partition("/")[0].partition("_")[2] for tag in tags]
    assert list(dict.fromkeys(groups)) == ["valid", "test", "train", "speed", "optim", "output", "memory"]
    metrics = {tag for record in read_metrics(runs / "adaptive") for tag in record if "/" in tag}
    assert set(tags) == {drawn_as(tag) for tag in metrics} | {BY_SECOND}, "every metric has a curve"


def test_hyperparameters_have_metrics(url: str, runs: Path) -> None:
    experiment = ask(url, "data/plugin/hparams/experiment", body={"experimentName": "", "includeMetrics": True})
    names = [info["name"] for info in experiment["hparamInfos"]]
    assert names[: len(SHOWN_FIRST)] == sorted(SHOWN_FIRST)
    assert sorted(names) == sorted(NUMBERS + WORDS)
    body = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_SUCCESS"],
        "colParams": [
            *({"hparam": name, "includeInResult": True} for name in names),
            *({"metric": {"group": "", "tag": tag}, "includeInResult": True} for tag in METRICS),
        ],
        "startIndex": 0,
        "sliceSize": 100,
    }
    groups = ask(url, "data/plugin/hparams/session_groups", body=body)["sessionGroups"]
    assert sorted(group["name"] for group in groups) == sorted(LAYERS), "all finished successfully"
    for group in groups:
        assert group["hparams"]["output.name"] == group["name"]
        assert group["hparams"]["model.hidden_size"] == 12
        values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
        last = [r["valid/ppl"] for r in read_metrics(runs / group["name"]) if "valid/ppl" in r][-1]
        assert values["1_valid/ppl"] == pytest.approx(last)


def test_hyperparameters_are_existing_settings(compose) -> None:
    options = [f"experiment={name}" for name in ("text8", "europarl", "zipf")]
    options += [f"output={name}" for name in plugin_names("output")]
    known = {key for option in options for key in flatten(asdict(compose(option)))}
    assert set(NUMBERS + WORDS) <= known


def test_resume_writes_no_event_twice(url: str) -> None:
    points = ask(url, "data/plugin/scalars/scalars", run="adaptive", tag="1_valid/ppl")
    assert [step for _, step, _ in points] == [10, 20, 30, 40, 50, 60]


def test_projector_shows_most_frequent_words(url: str, runs: Path) -> None:
    import lm

    loaded = lm.load(runs / "adaptive")
    model, vocabulary = loaded.model, loaded.vocabulary
    assert ask(url, "data/plugin/projector/runs") == ["adaptive"]
    (embedding,) = ask(url, "data/plugin/projector/info", run="adaptive")["embeddings"]
    assert embedding["tensorShape"] == [20, 8]
    words = ask(url, "data/plugin/projector/metadata", run="adaptive", name=embedding["tensorName"]).decode()
    expected = [f"{word}\t{count}" for word, count in zip(vocabulary.words, vocabulary.counts, strict=True)]
    assert words.splitlines() == ["word\tcount", *expected[:20]]
    rows = (runs / "adaptive/projector/vectors.tsv").read_text().splitlines()
    vectors = [[float(x) for x in row.split("\t")] for row in rows]
    assert vectors == [pytest.approx(row, rel=1e-4) for row in model.input.weight[:20].tolist()]


def test_deleted_working_directory_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The writer's thread must not print the error itself."""
    before = threading.excepthook
    (tmp_path / "run").mkdir()
    events = Events(tmp_path / "run", settings={}, began=0.0)
    events.flush()  # the thread has created its file before the folder is deleted
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OSError, match="No such file") as error:
        for step in range(1000):
            events.draw({"step": step, "time": 0.0, "train/loss": 1.0})
            events.flush()
    assert f": {tmp_path}/run/events.out." in in_words(error.value)
    with contextlib.suppress(OSError):
        events.close()
    assert "Traceback" not in capsys.readouterr().err
    assert threading.excepthook is before


# ---- profiles --------------------------------------------------------------------------------------------------------


def test_profile_writes_trace_and_table(command: Command, workspace: Path) -> None:
    done = command("train.py", *TINY, "run_dir=run", "trainer.profile=true")
    trace = workspace / "run/steps.pt.trace.json"
    assert f"The trace is in run/{trace.name}; open it with https://ui.perfetto.dev" in done.stdout
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in set(names)) == TRACED
    assert "aten::addmm" in names
    assert "Self CPU time total" in done.stdout and re.search(r"^ +aten::", done.stdout, re.MULTILINE)
    assert not list((workspace / "run").glob(".*partial"))


def test_too_short_run_writes_no_trace(command: Command, workspace: Path) -> None:
    done = command("train.py", *TINY, "run_dir=run", "trainer.profile=true", "trainer.max_steps=4")
    assert "No trace was written: it needs 10 steps" in done.stdout
    assert not (workspace / "run/steps.pt.trace.json").exists()
    again = command("train.py", "resume=run", "trainer.profile=true", "trainer.max_steps=30")
    assert "The trace is in" in again.stdout


@pytest.mark.gpu
def test_gpu_profile_counts_gpu_time(command: Command, workspace: Path) -> None:
    command("train.py", *TINY, "run_dir=run", "trainer.profile=true", "trainer.device=cuda")
    events = json.loads((workspace / "run/steps.pt.trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
