"""Run every command of README.md and docs/; those that need Docker or a download are only checked."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser as torchrun_options

import lm
from lm.config.schema import NgramConfig, PrepareConfig, TrainConfig
from tests.conftest import ROOT, TINY, compare_runs, run_command
from tests.helpers.docker import check_command as check_docker
from tests.helpers.pages import PAGES, RECIPES, blocks, check_line, commands

README = ROOT / "README.md"
COMMANDS = {
    " ".join(shlex.split(line, comments=True)): line for page in PAGES if page not in RECIPES for line in commands(page)
}
"""Keyed by the command without comments, so that none runs twice."""
IN_README = {" ".join(shlex.split(line, comments=True)) for line in commands(README)}
CASES = [
    pytest.param(line, id=key, marks=[] if key in IN_README else pytest.mark.slow) for key, line in COMMANDS.items()
]
"""Commands of other pages are slow tests; `make docs-check` runs all."""
SHELL = ("mkdir", "eval")
"""Commands that need a shell."""
SMALL = ["trainer.max_steps=8", "trainer.threads=1", "model.hidden_size=64", "output.cost_model=flops"]
SMALL += ["evaluate.streams=64", "evaluate.batch_size=64"]
CHECKED = (
    "experiment=text8",
    "experiment=europarl",
    "experiment=wikitext2",
    "experiment=one_billion_word",
    "experiment=compare",
    "-m",
)
"""Commands that need a network, or sweeps, which run in test_sweep.py: only composed."""
CHOICES = ("model=", "output=", "output.")
"""Commands that begin with a choice of plug-ins, which other tests train: only composed."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text in PATH, a run in runs/NAME and a model in FILE.arpa.gz, as in the README."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "PATH").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "PATH" / f"{split}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    (folder / "FILE").write_text("the quick brown fox\n")
    (folder / "SENTENCES").write_text("the quick brown fox\nthe lazy dog\n")
    (folder / "REFERENCES").write_text("u the quick brown fox\n")
    (folder / "LIST").write_text("u-1\t-2\tthe quick brown fox\nu-2\t-1\tthe quick\n")
    shutil.copytree(ROOT / "docs/results", folder / "docs/results")
    run_command(folder, "train.py", *TINY, "output=self_normalized", "run_dir=runs/NAME")
    run_command(
        folder, "lm/ngram/__main__.py", *(word for word in TINY if word.startswith("data")), "run_dir=runs/NGRAM"
    )
    run_command(folder, "lm/ngram/__main__.py", "data=text", "data.dir=PATH", "order=2", "out=FILE.arpa.gz")
    return folder


def test_first_commands_train_and_test() -> None:
    assert [line.partition("#")[0].split() for line in commands(README)[:2]] == [["make", "train"], ["make", "test"]]


def test_index_lists_every_page() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/index.md").read_text())
    assert sorted(listed) == sorted(page.name for page in ROOT.glob("docs/*.md") if page.name != "index.md")


@pytest.mark.parametrize("line", CASES)
def test_command(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = shlex.split(line, comments=True)
    if program in SHELL:
        _run_in_a_shell(line, place)
    elif program == "docker":
        check_docker([program, *rest])
    elif program == "make":
        done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif program == "torchrun":  # ranks run in test_distributed.py
        launch = torchrun_options().parse_args(rest)
        assert launch.training_script == "train.py"
        check_line(launch.training_script_args, name="train", schema=TrainConfig)
    elif rest[:2] == ["-m", "tensorboard.main"]:
        _look_at_tensorboard(rest, place)
    elif rest[0] == "-m" and rest[1].startswith("benchmarks."):  # run in tests/benchmarks; here arguments are checked
        benchmark = importlib.import_module(rest[1])
        monkeypatch.setattr(benchmark, "run", lambda _, parser, words: parser.parse_args(words))
        benchmark.main(rest[2:])
    elif rest[:2] == ["-m", "lm.prepare"]:
        if "data=text" in rest:
            run_command(place, "lm/prepare.py", *rest[2:])
        else:
            check_line(rest[2:], name="prepare", schema=PrepareConfig)
    elif rest[:2] == ["-m", "lm.ngram"] and {"data=europarl", "data=text8", "data=wikitext2"} & set(rest):
        check_line(rest[2:], name="ngram", schema=NgramConfig)
    elif rest[:2] == ["-m", "lm.compare"]:
        monkeypatch.setattr("lm.compare.can_plot", lambda: False)  # plots are drawn in tests/compare
        assert compare_runs([word if re.search("^--|,", word) else str(place / word) for word in rest[2:]]) == 0
    elif rest[0] == "train.py" and (rest[1].startswith(CHOICES) or any(word.startswith(CHECKED) for word in rest)):
        check_line(rest[1:], name="train", schema=TrainConfig)
    else:
        modules = {"lm.generate": "lm/generate.py"}
        modules |= {f"lm.{name}": f"lm/{name}/__main__.py" for name in ("ngram", "export")}
        script, *overrides = [modules[rest[1]], *rest[2:]] if rest[0] == "-m" else rest
        # The run's words are numbered, so that no prompt of the README's is made of them.
        overrides = [re.sub("^prompt=.*", "prompt=w000001", word) for word in overrides]
        if script == "train.py" and overrides[0].startswith("resume=runs"):
            overrides = [overrides[0], "trainer.max_steps=48"]
        elif script == "train.py" and overrides != ["--help"]:
            overrides = [*overrides, *SMALL, *(["data.tokens=3000"] if "experiment=zipf" in overrides else [])]
            if "experiment=small_maxent" in overrides:  # its output layer has no cutoffs
                overrides.remove("output.cost_model=flops")
        run_command(place, script, *(_in_new_folder(word, place) for word in overrides))


def _in_new_folder(word: str, place: Path) -> str:
    """Rename the folder of a new run if a command of another page has made it."""
    key, _, path = word.partition("=")
    return f"{word}-{time.monotonic_ns()}" if key in ("run_dir", "out") and (place / path).is_dir() else word


def test_commands_are_quoted_for_the_shell() -> None:
    lines = "\n".join(COMMANDS.values())
    done = subprocess.run(["bash", "-n"], input=lines, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    unquoted = [re.sub("'[^']*'|\"[^\"]*\"|#.*", "", line) for line in COMMANDS.values()]
    assert not [line for line in unquoted if set(line) & set("*?()")]


def _run_in_a_shell(line: str, place: Path) -> None:
    """As typed into bash with the environment activated; the scripts are reached from the folder as from a clone."""
    (place / "train.py").unlink(missing_ok=True)
    (place / "train.py").symlink_to(ROOT / "train.py")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    shell = ["bash", "-euo", "pipefail", "-c", line]
    done = subprocess.run(shell, cwd=place, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _look_at_tensorboard(arguments: list[str], place: Path) -> None:
    """Start it as the README says, on a free port, and ask it for the names of the runs."""
    command = [sys.executable, *arguments, "--port=0", "--load_fast=false"]
    server = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+:\d+/", line)))
        for _ in range(100):  # it answers before it has read its folder
            with urllib.request.urlopen(f"{url}data/runs") as answer:
                runs = json.load(answer)
            if runs:
                break
            time.sleep(0.2)
        assert "NAME" in runs
    finally:
        server.kill()
        server.wait()


def test_python_examples_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    names: dict[str, object] = {"hidden": torch.randn(3, 2, 512), "targets": torch.randint(0, 50_000, (3, 2))}
    for block in blocks(README):
        if block.kind == "python":
            exec(block.text, names)
    assert names["loss"].item() > 0  # type: ignore[attr-defined]
    assert len(names["model"].next_word("w000001")) == 5  # type: ignore[attr-defined]


def test_links_resolve() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_citation_matches_version_and_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lm.__version__
    assert citation["preferred-citation"]["title"] in README.read_text()
    assert citation["preferred-citation"]["url"] in README.read_text()
