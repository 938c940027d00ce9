"""The command line: mistakes told once and clearly, paths taken as typed, --help without torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lm.config import command_line as cli
from lm.config.command_line import ONE_RUN, VERBATIM, check_overrides, compose, compose_plainly, quote_verbatim
from lm.config.commands import TrainConfig
from lm.system.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def mistakes(*arguments: str) -> list[str]:
    with pytest.raises(UserError) as error:
        check_overrides(arguments, name="train", schema=TrainConfig)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["optim.lrr=0.1"], ["optim.lrr is not a setting. Did you mean optim.lr?"]),
        (["outptu=full"], ["outptu is not a group of settings. Did you mean output?"]),
        (["+optim.lrr=0.1"], ["optim.lrr is not a setting. Did you mean optim.lr?"]),
        (["++optim.lrr=0.1"], ["optim.lrr is not a setting. Did you mean optim.lr?"]),
        (["+seed=1"], ["+seed: the setting exists already. Try it without the plus sign."]),
        (["~seed"], ["~seed: settings cannot be removed. Try seed=1"]),
        (["data.tokens=9"], ["data.tokens is not a setting of data=pydoc; it belongs to data=zipf."]),
        (["hello"], ["hello is not understood: settings are given as key=value, options as group=option."]),
        (["model=null"], ["model=null does not exist. The options of model are: "]),
        (
            ["trainer.batch_size=-1", "optim.lr=abc"],
            [
                "optim.lr must be a number, above 0; got 'abc'. Try optim.lr=0.1",
                "trainer.batch_size must be a whole number, at least 1; got -1. Try trainer.batch_size=",
            ],
        ),
        (
            ["data=zip", "seed=x", "trainer.foo=1", "optim.schedule=halve_after_half", "trainer.max_epochs=null"],
            [
                "data=zip does not exist. Did you mean data=zipf? The options of data are: europarl, ",
                "trainer.foo is not a setting. The keys there are: trainer.batch_size, ",
                "trainer.max_epochs, max_steps, max_tokens and max_seconds must not all be null",
                "seed must be a whole number, at least 0; got 'x'. Try seed=1",
            ],
        ),
        (["data=text"], ["data.dir must name the folder with train.txt, valid.txt and test.txt; got nothing."]),
        (["data=europarl", "data.language=xx"], ["data.language must be one of bg cs da "]),
        (["output.name=foo"], ["output.name must be one of adaptive, dsoftmax, dsoftmax_star, "]),
        (["run_dir=", "resume="], ["run_dir must not be empty. Try run_dir=null", "resume must not be empty."]),
        (
            ["optim.weight_decay=0.1"],
            ["optim.lr times optim.weight_decay must be below 0.003"],
        ),
        (["trainer.compile=true", "output.fused=false"], ["trainer.compile=true needs output.fused=true"]),
        (["model.projection=9999"], ["model.projection must be below model.hidden_size"]),
        (["trainer.device=gpu"], ["trainer.device must be auto, cpu, cuda or cuda:N; got 'gpu'."]),
        (["seed=a(b"], ["seed=a(b is not understood: the value holds characters with a meaning of their own."]),
        (["model=small,smal"], ["model=smal does not exist. Did you mean model=small? "]),
        (
            ["optim.lr=interval(0,1)"],
            ["optim.lr=interval(0,1): an interval has no list of values. Try optim.lr=choice("],
        ),
        (["optim.lr=0.1,0"], ["optim.lr must be a number, above 0; got 0. Try optim.lr=0.1"]),
    ],
)
def test_mistakes(arguments: list[str], expected: list[str]) -> None:
    found = mistakes(*arguments)
    assert len(found) == len(expected)
    for line, beginning in zip(found, expected, strict=True):
        assert line.startswith(beginning)


def test_sound_command_lines_pass() -> None:
    for arguments in [[], ["data=zipf", "data.vocab_size=99"], ["optim.lr=1,2"], ["hydra.verbose=true"]]:
        check_overrides(arguments, name="train", schema=TrainConfig)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["data=zipf", "data.vocab_size=99"],
        ["experiment=text8", "seed=3"],
        ["experiment=compare_small", ONE_RUN],
    ],
)
def test_sound_command_lines_for_one_run_are_composed_once(arguments: list[str]) -> None:
    plain = compose_plainly(arguments, name="train", schema=TrainConfig)
    assert plain == (compose(arguments, name="train", schema=TrainConfig), [a for a in arguments if a != ONE_RUN])


@pytest.mark.parametrize(
    "argument",
    [
        *["--help", "-m", "+seed=1", "~seed", "hydra.verbose=true", "hydra/launcher=slurm"],
        *["optim.lr=1,2", "output=full,hsm_sim", "experiment=compare_small"],
        *["optim.lrr=1", "seed=x", "data=zip", "model=null"],
    ],
)
def test_mistakes_sweeps_and_what_hydra_is_asked_for_take_the_long_way(argument: str) -> None:
    assert compose_plainly([argument], name="train", schema=TrainConfig) is None


@pytest.mark.parametrize("way", [[], ["hydra.verbose=false"]], ids=["plain", "hydra"])
def test_a_job_gets_its_config_and_overrides_either_way(way: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the command sets it; patched, it is taken back
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=7", "run_dir=a, b", *way])
    jobs: list[tuple[TrainConfig, list[str]]] = []
    cli.command(lambda *job: jobs.append(job), name="train", schema=TrainConfig)
    ((config, overrides),) = jobs
    assert (config.seed, config.run_dir, overrides) == (7, "a, b", ["seed=7", "run_dir='a, b'"])


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
@example("\\\n")
@settings(max_examples=300, deadline=None)
def test_paths_arrive_as_typed(path: str) -> None:
    parsed = OverridesParser.create().parse_override(quote_verbatim(f"run_dir={path}")).value()
    arrived = OmegaConf.create({"run_dir": parsed}).run_dir
    assert arrived == (None if path == "null" else path)


def test_only_paths_are_quoted() -> None:
    assert quote_verbatim("optim.lr=0.1") == "optim.lr=0.1"
    assert quote_verbatim("--help") == "--help"
    assert quote_verbatim("run_dir=") == "run_dir="
    assert all(quote_verbatim(f"{key}=a=b,(c)") == f"{key}='a=b,(c)'" for key in VERBATIM)


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python` is ours and a torch that cannot be imported stands first on the path."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": path}


def test_help_lists_groups_and_options_without_torch(without_torch: dict[str, str]) -> None:
    for program, words in [
        (["train.py"], ["pydoc", "zipf", "adagrad", "batch_size"]),
        (["evaluate.py"], ["checkpoint", "mode=score"]),
        (["-m", "lm.generate"], ["checkpoint", "temperature"]),
    ]:
        done = subprocess.run(
            [sys.executable, *program, "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=without_torch,
        )
        assert done.returncode == 0, done.stderr
        assert all(word in done.stdout for word in words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python train.py outp", "output. output="),
        ("python train.py output=ds", "output=dsoftmax output=dsoftmax_star"),
        ("python train.py data=zipf data.vo", "data.vocab_size="),
        ("python evaluate.py check", "checkpoint="),
    ],
)
def test_bash_completes_groups_options_and_settings_without_torch(
    line: str, expected: str, without_torch: dict[str, str]
) -> None:
    """What the README has a user type, and then what bash itself does when the tabulator key is pressed."""
    press_tab = """
        eval "$(python train.py -sc install=bash)"
        COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=($1) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        $(complete -p python | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        echo "${COMPREPLY[*]}"
    """
    done = subprocess.run(
        ["bash", "-c", press_tab, "bash", line], capture_output=True, text=True, cwd=ROOT, env=without_torch
    )
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_a_mistake_exits_with_2_and_one_paragraph(command) -> None:
    done = command("train.py", "optim.lrr=0.1", check=2)
    assert done.stdout == ""
    assert done.stderr == "optim.lrr is not a setting. Did you mean optim.lr?\n"


def test_an_option_that_is_null_is_told_as_one_that_does_not_exist(command) -> None:
    assert command("train.py", "model=null", check=2).stderr.startswith("model=null does not exist. The options of")


def test_paths_that_look_like_interpolations_survive_a_run(command) -> None:
    from tests.conftest import TINY

    done = command("train.py", *TINY, "trainer.max_steps=2", "run_dir=a ${b} 'c'")
    assert "a ${b} 'c'" in done.stdout


@pytest.mark.slow
def test_a_full_disk_and_a_closed_pipe_are_no_tracebacks(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk; the metrics are the first to meet it."""
    from tests.conftest import TINY

    train = f"{sys.executable} {ROOT}/train.py {' '.join(TINY)}"
    full = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f 1; {train} run_dir=x data.tokens=1000 data.vocab_size=16"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {train} | head -n 1"], capture_output=True, text=True, cwd=tmp_path
    )
    assert piped.returncode == 128 + signal.SIGPIPE
    assert piped.stderr == ""


def test_control_characters_do_not_reach_the_terminal(command) -> None:
    done = command("train.py", "data=text", "data.dir=/no\x1b[31mwhere\x07", check=2)
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr
    assert "\\x1b[31mwhere" in done.stderr
    assert "Traceback" not in done.stderr
