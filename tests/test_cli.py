"""The command line: reporting all mistakes, Hydra's flags, user configs, help and completion."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lm.cli import LONGEST_NAME, compose_config, find_mistakes, parse_flags, slug, sweep_settings
from lm.config.schema import TrainConfig
from tests.conftest import ROOT, SCHEMAS, TINY, Command

GOLDEN = ROOT / "tests/golden/mistakes.txt"
"""Command lines with mistakes, of `train` or the command they name, each followed by the expected messages."""


def golden() -> dict[str, list[str]]:
    cases: dict[str, list[str]] = {}
    for line in GOLDEN.read_text().splitlines():
        if line.startswith("    "):
            cases[list(cases)[-1]].append(line.strip())
        elif line:
            cases[line] = []
    return cases


@pytest.mark.parametrize(("line", "expected"), golden().items(), ids=list(golden()))
def test_mistakes_match_golden_file(line: str, expected: list[str]) -> None:
    name, colon, words = line.partition(": ")
    name, words = (name, words) if colon else ("train", line)
    assert list(find_mistakes(parse_flags(words.split()), name, SCHEMAS[name])) == expected


def test_import_in_a_thread() -> None:
    """Only the main thread may handle signals."""
    program = """
import threading
outcome = []
def load():
    import lm.cli
    outcome.append(lm.cli.__name__)
thread = threading.Thread(target=load)
thread.start()
thread.join()
assert outcome == ["lm.cli"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_valid_command_lines_have_no_mistakes() -> None:
    for line in ["", "data=zipf data.vocab_size=99", "-m optim.lr=1,2", "hydra.verbose=true", "seed=3 -m output=full"]:
        assert list(find_mistakes(parse_flags(line.split()), "train", TrainConfig)) == []


def test_mistake_exits_with_2_and_one_paragraph(command: Command) -> None:
    done = command("train.py", "optim.lrr=0.1", check=2)
    assert (done.stdout, done.stderr) == ("", "optim.lrr is not a setting. Did you mean optim.lr?\n")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("-m seed=range(0)", "matches nothing"),
        ("-m optim.lr=interval(0.1,1)", "INTERVAL"),
        ("optim.lr=1,2", "optim.lr=1,2"),
        ("-m optim.lr=1,0", "optim.lr must"),
        ("--config-name nope", "nope"),
        ("--config-name ngram", "--config-name=ngram belongs to another command. Omit it."),
        ("--config-name evaluate", "--config-name=evaluate belongs to another command. Omit it."),
        ("--config-dir nowhere seed=1", "--config-dir nowhere"),
        ("hydra.searchpath=[nowhere]", "nowhere"),
        ("hydra.nope=1", "hydra.nope"),
        ("-m hydra.verbose=true,false", "Sweeping over Hydra's configuration"),
        ("hydra/sweeper=basi", "Did you mean hydra/sweeper=basic?"),
        ("-m hydra/launcher=proces seed=1,2", "Did you mean hydra/launcher=process?"),
        ("--cfg job optim.lrr=1", "optim.lrr"),
        ("--cfg job -p nope", "package 'nope' not found in config"),
        ("run_dir=a\udcff", "Settings must be UTF-8"),
        ("run_dir='a\udcff'", "Settings must be UTF-8"),
        ("-m resume=runs/x seed=1,2", "resume=runs/x"),
        ("-m data.root='a;b','a:b'", "share the directory"),
        ("run_dir=a(b", "run_dir='a(b'"),
    ],
)
def test_hydra_errors_are_one_line_with_exit_code_2(command: Command, workspace: Path, line: str, key: str) -> None:
    done = command("train.py", *line.split(), check=2)
    assert key in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert not list(workspace.rglob("config.yaml")), "nothing has run"


@pytest.mark.parametrize("flag", ["--config-path=x", "--experimental-rerun=x"])
def test_unsupported_flags_exit_with_2(flag: str) -> None:
    with pytest.raises(SystemExit) as error:
        parse_flags([flag])
    assert error.value.code == 2


# ---- help and completion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train.py", ["output: adaptive", "optim.lr=0.1", "Learning rate", "output.head_coverage", "--config-dir"]),
        ("evaluate.py", ["checkpoint=null", "mode=score", "cache_size"]),
        ("lm/generate.py", ["temperature=1.0"]),
        ("lm/ngram/__main__.py", ["order=5", "docstrings"]),
        ("lm/prepare.py", ["data: docstrings", "data.min_count"]),
    ],
)
def test_help_explains_every_setting(command: Command, script: str, words: list[str]) -> None:
    answer = command(script, "--help").stdout
    assert [word for word in words if word not in answer] == []


def test_help_follows_the_chosen_options(command: Command) -> None:
    answer = command("train.py", "output=hsm_freq", "optim=sgd", "-h").stdout
    assert "output.num_classes=null" in answer and "optim.momentum=0.0" in answer
    assert "head_coverage" not in answer


@pytest.mark.slow
def test_bash_completes_groups_options_and_settings() -> None:
    """Installs completion as the README says, then emulates pressing Tab in bash."""
    completed = {
        "python train.py outp": "output. output=",
        "python train.py output=ds": "output=dsoftmax output=dsoftmax_star",
        "python train.py data=zipf data.vo": "data.vocab_size=",
        "python evaluate.py check": "checkpoint=",
    }
    press_tab = """
        eval "$(python train.py -sc install=bash)"
        for line in "$@"; do
            COMP_LINE=$line COMP_POINT=${#line} COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
            $(complete -p python | sed 's/.*-F \\([^ ]*\\).*/\\1/')
            echo "${COMPREPLY[*]}"
        done
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-c", press_tab, "bash", *completed]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    answers = [line.strip() for line in done.stdout.splitlines()]
    assert (dict(zip(completed, answers, strict=True)), done.stderr) == (completed, "")


# ---- robustness of the terminal --------------------------------------------------------------------------------


@pytest.mark.slow
def test_closed_pipe_leaves_no_traceback(tmp_path: Path) -> None:
    train = f"{sys.executable} {ROOT}/train.py {' '.join(TINY)}"
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {train} | head -n 1"], capture_output=True, text=True, cwd=tmp_path
    )
    assert piped.returncode == 128 + signal.SIGPIPE
    assert piped.stderr == ""


def test_control_characters_do_not_reach_the_terminal(command: Command) -> None:
    done = command("train.py", "data=text", "data.dir='/no\x1b[31mwhere\x07'", check=2)
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr
    assert "\\x1b[31mwhere" in done.stderr
    assert "Traceback" not in done.stderr


# ---- user configs ---------------------------------------------------------------------------------------------


MINE = """# @package _global_
defaults:
  - override /data: zipf
  - _self_

data: {vocab_size: 30, tokens: 2000}
trainer: {max_epochs: null, max_steps: 2, batch_size: 4}
model: {embedding_size: 8, hidden_size: 12}
"""


@pytest.fixture
def configs(workspace: Path) -> Path:
    """A folder of configs outside the repository."""
    folder = workspace / "my configs"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment/mine.yaml").write_text(MINE)
    (folder / "mine.yaml").write_text("defaults:\n  - train\n  - _self_\nseed: 7\n")
    return folder


@pytest.mark.parametrize("flags", [["--config-dir", "my configs"], ["hydra.searchpath=['my configs']"]])
def test_external_experiments_run(command: Command, configs: Path, flags: list[str]) -> None:
    done = command("train.py", *flags, "experiment=mine", "run_dir=run", "output=full")
    assert "Test perplexity" in done.stdout
    assert OmegaConf.load(configs.parent / "run/config.yaml").model.hidden_size == 12


def test_another_primary_config_runs(command: Command, configs: Path) -> None:
    flags = ["--config-dir", str(configs), "--config-name=mine"]
    command("train.py", *flags, "experiment=mine", "run_dir=run", "output=full")
    assert OmegaConf.load(configs.parent / "run/config.yaml").seed == 7


def test_user_defined_group(configs: Path) -> None:
    (configs / "overlay").mkdir()
    (configs / "overlay/slow.yaml").write_text("# @package _global_\noptim: {lr: 0.01}\n")
    line = ["--config-dir", str(configs), "+overlay=slow"]
    assert compose_config(line, name="train", schema=TrainConfig).optim.lr == 0.01
    (mistake,) = find_mistakes(parse_flags([*line[:2], "+overlay=slwo"]), "train", TrainConfig)
    assert "overlay=slwo" in mistake and "overlay=slow?" in mistake


@pytest.mark.parametrize("flags", [["--config-dir", "my configs"], ["hydra.searchpath=['my configs']"]])
def test_mistakes_in_user_configs(command: Command, configs: Path, flags: list[str]) -> None:
    experiments = configs / "experiment"
    done = command("train.py", *flags, "experiment=mien", "seed=x", "+unknown=1", check=2)
    assert [key in done.stderr for key in ("experiment=mine?", "unknown is not", "seed must be")] == [True] * 3

    (experiments / "mine.yaml").write_text(MINE + "optim: {lrr: 1}\n")
    assert "optim.lr?" in command("train.py", *flags, "experiment=mine", "seed=x", check=2).stderr
    for text in (
        MINE.replace("zipf", "nowhere"),
        MINE + "seed: [1,\n",
        MINE + "seed: ${nowhere}\n",
        "- 1\n",
        "\xff\xfe",
    ):
        (experiments / "mine.yaml").write_bytes(text.encode("latin-1"))
        done = command("train.py", *flags, "experiment=mine", check=2)
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_hydra_run_dir_is_the_run_directory(command: Command, workspace: Path) -> None:
    command("train.py", *TINY, "trainer.max_steps=2", "hydra.run.dir=by/hydra", "hydra.job.chdir=true")
    assert (workspace / "by/hydra/summary.json").exists()
    assert not (workspace / "runs").exists()


def test_run_dir_is_named_by_settings(command: Command, workspace: Path) -> None:
    """With `+experiment=` too, as Hydra spells a group that has no default."""
    short = ["optim.schedule=constant", "trainer.max_steps=2"]
    command("train.py", "+experiment=zipf", *TINY, *short, "run_dir='by/${output.name}-s${seed}'")
    assert (workspace / "by/full-s1/summary.json").exists()
    assert not (workspace / "runs").exists()


# ---- names of sweeps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        ("output=full,adaptive experiment=text8", "text8"),
        ("output=full,adaptive optim.lr=0.05", "sweep-lr-0.05"),
        ("data=zipf seed=range(1,3)", "zipf"),
        ("seed=1,2 trainer.device=cpu trainer.log_every_steps=3 run_dir=x", "sweep"),
        ("seed=1,2 trainer.max_epochs=9", "sweep-max_epochs-9"),
        ("experiment=text8,zipf output=full", "sweep-output-full"),
    ],
)
def test_sweep_folder_is_named_by_the_fixed_settings(overrides: str, folder: str) -> None:
    assert f"hydra.sweep.dir='runs/{folder}'" in sweep_settings(overrides.split())


def test_slugs_are_safe_short_and_distinct() -> None:
    assert slug("a b=[1,2]/c") == "a-b-1-2-c"
    long = [slug("x" * 200 + end) for end in "ab"]
    assert long[0] != long[1]
    assert all(len(name) <= LONGEST_NAME for name in long)


def test_sweep_folder_with_unicode_is_quoted() -> None:
    (setting,) = [text for text in sweep_settings(["prompt='ünï 日本'"]) if text.startswith("hydra.sweep.dir")]
    (parsed,) = OverridesParser.create().parse_overrides([setting])
    assert parsed.value() == "runs/sweep-prompt-ünï-日本"
