"""Shared fixtures: running commands in process, and small composed settings."""

import gc
import inspect
import io
import itertools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lm import cli
from lm.compare.__main__ import main as compare_command
from lm.config.inference import EvaluateConfig, ExportConfig, GenerateConfig
from lm.config.schema import NgramConfig, PrepareConfig, TrainConfig
from lm.config.validate import make_config
from lm.export.__main__ import start as export
from lm.inference.evaluate import evaluate
from lm.inference.generation import generate
from lm.ngram.run import run_ngrams
from lm.prepare import start as prepare
from lm.training.run import train
from tests.helpers.emulated_cuda import Gpu, emulated_cuda

ROOT = Path(__file__).resolve().parent.parent
TINY = """
    data=zipf data.vocab_size=30 data.tokens=2000 model=small model.embedding_size=8 model.hidden_size=12
    trainer.batch_size=4 trainer.bptt=5 trainer.max_epochs=null trainer.max_steps=40 trainer.log_every_steps=7
    trainer.threads=1 evaluate.streams=3 output=full
""".split()  # noqa: SIM905
"""Settings of a complete run that takes a second."""

# More threads only wait for each other on tensors this small, all the more where the machine is busy.
torch.set_num_threads(1)
# Tests kill processes, never the machine: what a process has written is there. Waiting for the disk takes longer than
# many a test.
os.fsync = lambda _: None

cli.prepare_hydra()

JOBS: dict[str, tuple[str, type, Callable[[Any, list[str]], object]]] = {
    "train.py": ("train", TrainConfig, train),
    "evaluate.py": ("evaluate", EvaluateConfig, lambda config, _: evaluate(config)),
    "lm/generate.py": ("generate", GenerateConfig, lambda config, _: generate(config)),
    "lm/ngram/__main__.py": ("ngram", NgramConfig, lambda config, given: run_ngrams(config, overrides=given)),
    "lm/prepare.py": ("prepare", PrepareConfig, inspect.unwrap(prepare.args[0])),
    "lm/export/__main__.py": ("export", ExportConfig, inspect.unwrap(export.args[0])),
}
"""Name, settings and function of each command."""
SCHEMAS: dict[str, type] = {name: schema for name, schema, _ in JOBS.values()}
PLAIN = re.compile(r"(?!hydra|experiment)[\w.]+=")
"""Overrides that only need composing."""
TIMES = ("time", "train_seconds", "eval_seconds", "speed/", "memory/")
Command = Callable[..., "subprocess.CompletedProcess[str]"]
Tiny = Callable[..., TrainConfig]


LONGEST = {"test_on_gpu.py", "test_distributed.py", "test_contract.py", "test_sweepers.py", "test_step.py"}
"""Files with the slowest tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that no worker is left with one at the end; mark what uses a real GPU."""
    for item in items:
        if "cuda" in getattr(item, "fixturenames", ()) and torch.cuda.is_available():
            item.add_marker("gpu")
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    keep_what_is_imported()


def keep_what_is_imported() -> None:
    """Exempt everything imported so far from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def run_command(
    folder: Path, *arguments: str, check: int | None = 0, stdin: bytes = b""
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder as a user would, but in this process; `check` is the expected exit code."""
    script, *rest = arguments
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *rest])
        patch.setattr(sys, "orig_argv", ["python", script, *rest])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin))))  # type: ignore[arg-type]
        patch.setenv("HYDRA_FULL_ERROR", "1")  # the command sets it; patched, it is taken back
        try:
            run_script(script, rest)
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    assert check in (None, code), out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())


def compare_runs(arguments: list[str]) -> int:
    """Run lm.compare in this process; its exit code."""
    try:
        compare_command(arguments)
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def run_script(script: str, overrides: list[str]) -> None:
    """Run a command. Plain ones are composed here, because Hydra composes twice, which takes longer than a TINY run."""
    if script == "lm.compare":
        sys.exit(compare_runs(overrides))
    known = {field.name for field in fields(JOBS[script][1])} if script in JOBS else set()
    if not all(PLAIN.match(text) and re.split(r"[.=]", text)[0] in known for text in overrides) or not known:
        runpy.run_path(str(ROOT / script), run_name="__main__")
        return
    name, schema, job = JOBS[script]
    cli.run(lambda: job(deepcopy(composed(*overrides, name=name)), overrides), name=name, schema=schema)


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Drop the times from a metrics record; the rest must be reproducible."""
    return {key: value for key, value in record.items() if not key.startswith(TIMES)}


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished TINY run; read only."""
    folder = tmp_path_factory.mktemp("tiny")
    run_command(folder, "train.py", *TINY, "run_dir=run")
    return folder / "run"


@pytest.fixture
def cuda() -> Iterator[Gpu | None]:
    """A GPU: the machine's, or an emulated one."""
    if torch.cuda.is_available():
        yield None
        return
    with emulated_cuda() as gpu:
        yield gpu


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty folder to run commands in."""
    return tmp_path


@pytest.fixture
def command(workspace: Path) -> Command:
    """`run_command` in the workspace."""
    return partial(run_command, workspace)


@cache
def composed(*overrides: str, name: str = "train") -> Any:
    """The typed config of a command line."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    is_choice = [(ROOT / "conf" / override.key_or_group).is_dir() for override in parsed]
    choices = list(itertools.compress(overrides, is_choice))
    if any(choice.startswith("experiment=") for choice in choices):
        values = deepcopy(_chosen(name, *choices))
    else:
        values = deepcopy(_chosen(name))
        for choice in choices:
            group = choice.partition("=")[0]
            values[group] = deepcopy(_chosen(name, choice)[group])
    for override in itertools.compress(parsed, (not choice for choice in is_choice)):
        OmegaConf.update(values, override.key_or_group, override.value())
    return make_config(values, SCHEMAS[name])


@cache
def _chosen(name: str, *choices: str) -> DictConfig:
    """The config of options alone; composing takes a tenth of a second."""
    config = cli.compose(cli.parse_flags(choices), name)
    return OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])


@pytest.fixture
def compose() -> Callable[..., TrainConfig]:
    """The typed config of a command line, without running it."""
    return lambda *overrides: deepcopy(composed(*overrides))


@pytest.fixture
def tiny(compose: Callable[..., TrainConfig], workspace: Path) -> Callable[..., TrainConfig]:
    """TINY settings with further overrides, writing to the workspace."""

    def make(*overrides: str) -> TrainConfig:
        config = compose(*TINY, "data.root=WORKSPACE/data", "run_dir=WORKSPACE/run", *overrides)
        config.data.root = config.data.root.replace("WORKSPACE", str(workspace))
        config.run_dir = config.run_dir and config.run_dir.replace("WORKSPACE", str(workspace))
        return config

    return make
