"""The command line: all mistakes at once, paths taken as typed, other people's configs, --help without torch."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lm.config import command_line as cli
from lm.config.command_line import VERBATIM, CommandLine, quote_verbatim
from lm.config.commands import TrainConfig
from lm.system.errors import UserError
from tests.conftest import ROOT, TINY, Command


def mistakes(*arguments: str) -> list[str]:
    with pytest.raises(UserError) as error:
        CommandLine(arguments, name="train", schema=TrainConfig).check()
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["optim.lrr=0.1"], ["optim.lrr is not a setting. Did you mean optim.lr?"]),
        (["outptu=full"], ["outptu is not a setting. Did you mean output?"]),
        (["+optim.lrr=0.1"], ["optim.lrr is not a setting. Did you mean optim.lr?"]),
        (["++optim.lrr=0.1"], ["optim.lrr is not a setting. Did you mean optim.lr?"]),
        (["+seed=1"], ["+seed: the setting exists already. Try it without the plus sign."]),
        (["~seed"], ["~seed: settings cannot be removed. Try seed=1"]),
        (["data.tokens=9"], ["data.tokens is not a setting of data=pydoc; it belongs to data=zipf."]),
        (["hello"], ["hello is not understood. Settings are key=value."]),
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
                "data=zip does not exist. Did you mean data=zipf? The options of data are: docstrings, ",
                "trainer.foo is not a setting. The keys there are: trainer.average, trainer.batch_size, ",
                "trainer.max_epochs, max_steps, max_tokens and max_seconds must not all be null",
                "seed must be a whole number, at least 0; got 'x'. Try seed=1",
            ],
        ),
        (["data=text"], ["data.dir must name the folder with train.txt, valid.txt and test.txt; got nothing."]),
        (["data=europarl", "data.language=xx"], ["data.language must be one of bg cs da "]),
        (["output.name=foo"], ["output.name must be one of adaptive, blackout, dsoftmax, "]),
        (["run_dir=", "resume="], ["run_dir must not be empty. Try run_dir=null", "resume must not be empty."]),
        (["optim.weight_decay=0.1"], ["optim.lr times optim.weight_decay must be below 0.003"]),
        (["optim.accumulator_start=0"], ["optim.accumulator_start must be a number, at least 1e-30 and at most 1e+30"]),
        (["trainer.average=0"], ["trainer.average must be a number, at least 0.001 and below 1 or null; got 0. "]),
        (["optim=sgd", "optim.weight_decay=0.25"], ["optim.lr times optim.weight_decay must be below 1, or "]),
        (["trainer.compile=true", "output.fused=false"], ["trainer.compile=true needs output.fused=true"]),
        (["model.projection=9999"], ["model.projection must be below model.hidden_size"]),
        (["trainer.device=gpu"], ["trainer.device must be auto, cpu, cuda or cuda:N; got 'gpu'."]),
        (["seed=a(b"], ["seed=a(b is not understood. The value needs two pairs of quotes: \"seed='...'\""]),
        (["model=small,smal"], ["model=smal does not exist. Did you mean model=small? "]),
        (["optim.lr=interval(0,1)"], ["optim.lr must be a number, above 0; got 0.0. Try optim.lr=0.1"]),
        (["seed=range(-1,3)"], ["seed must be a whole number, at least 0; got -1. Try seed=1"]),
        (["output=glob(zz*)"], ["output=glob(zz*) matches nothing, so there is nothing to run."]),
        (["+experiment=zipf"], ["+experiment: the group has an option already. Try it without the plus sign."]),
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
        CommandLine(arguments, name="train", schema=TrainConfig).check()


def test_a_sound_command_line_for_one_run_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A composition takes a tenth of a second; Hydra's own way of starting a job takes three of them."""
    lines: list[list[str]] = []
    load = ConfigLoaderImpl.load_configuration

    def count(self: ConfigLoaderImpl, name: str, overrides: list[str], *rest: Any) -> Any:
        lines.append(overrides)
        return load(self, name, overrides, *rest)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", count)
    monkeypatch.setattr(sys, "argv", ["train.py", "experiment=compare", "hydra.mode=RUN"])
    cli.command(lambda config, overrides: None, name="train", schema=TrainConfig)  # noqa: ARG005
    assert lines == [["experiment=compare", "hydra.mode=RUN"]]


@pytest.mark.parametrize("way", [[], ["hydra.verbose=false"]], ids=["plain", "hydra"])
def test_a_job_gets_its_config_and_overrides(way: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the command sets it; patched, it is taken back
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=7", "run_dir=a, b", *way])
    jobs: list[tuple[TrainConfig, list[str]]] = []
    cli.command(lambda *job: jobs.append(job), name="train", schema=TrainConfig)
    ((config, overrides),) = jobs
    assert (config.seed, config.run_dir, overrides) == (7, "a, b", ["seed=7", "run_dir=a, b"])


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
    """An environment in which `python` is ours and a torch that cannot be imported comes first on the path."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": path}


def test_help_lists_groups_and_options_without_torch(without_torch: dict[str, str]) -> None:
    words = {
        "train.py": ["pydoc", "zipf", "adagrad", "batch_size"],
        "evaluate.py": ["checkpoint", "mode=score"],
        "lm/generate.py": ["checkpoint", "temperature"],
        "lm/ngram/__main__.py": ["order: 5", "arpa"],
    }
    ask_all = """
        import runpy, sys
        for program in sys.argv[1:]:
            sys.argv = [program, "--help"]
            print("====")
            try:
                runpy.run_path(program, run_name="__main__")
            except SystemExit as end:
                assert not end.code, end.code
    """
    command = [sys.executable, "-c", textwrap.dedent(ask_all), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=without_torch)
    assert done.returncode == 0, done.stderr
    for answer, expected in zip(done.stdout.split("====\n")[1:], words.values(), strict=True):
        assert all(word in answer for word in expected)


def test_bash_completes_groups_options_and_settings_without_torch(without_torch: dict[str, str]) -> None:
    """What the README has a user type, and then what bash itself does when the tabulator key is pressed."""
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
    command = ["bash", "-c", press_tab, "bash", *completed]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=without_torch)
    answers = [line.strip() for line in done.stdout.splitlines()]
    assert (dict(zip(completed, answers, strict=True)), done.stderr) == (completed, "")


def test_a_mistake_exits_with_2_and_one_paragraph(command: Command) -> None:
    done = command("train.py", "optim.lrr=0.1", check=2)
    assert done.stdout == ""
    assert done.stderr == "optim.lrr is not a setting. Did you mean optim.lr?\n"


def test_an_option_that_is_null_is_reported_as_one_that_does_not_exist(command: Command) -> None:
    assert command("train.py", "model=null", check=2).stderr.startswith("model=null does not exist. The options of")


def test_paths_that_look_like_interpolations_survive_a_run(command: Command) -> None:
    done = command("train.py", *TINY, "trainer.max_steps=2", "run_dir=a ${b} 'c'")
    assert "a ${b} 'c'" in done.stdout


@pytest.mark.slow
def test_a_full_disk_and_a_closed_pipe_are_no_tracebacks(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk; the metrics are the first to meet it."""
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


def test_control_characters_do_not_reach_the_terminal(command: Command) -> None:
    done = command("train.py", "data=text", "data.dir=/no\x1b[31mwhere\x07", check=2)
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr
    assert "\\x1b[31mwhere" in done.stderr
    assert "Traceback" not in done.stderr


# ---- Hydra's own flags and settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-m seed=range(0)", "seed=range(0) matches nothing, so there is nothing to run."),
        ("-m output=glob(zz*)", "output=glob(zz*) matches nothing, so there is nothing to run."),
        ("-m optim.lr=interval(0.1,1)", "optim.lr=interval(0.1,1): an interval has no list of values. Try optim.lr="),
        ("optim.lr=1,2", "optim.lr=1,2: several values need -m, which starts a run for each."),
        ("optim.lr=1,2 seed=x", "seed must be a whole number, at least 0; got 'x'. Try seed=1"),
        ("--resolve", "--resolve: The --resolve flag can only be used in conjunction with --cfg or --help"),
        ("-m --cfg job", "-m --cfg job: Only one of "),
        ("-sc foo=bar", "-sc foo=bar: Expecting one subcommand from ['install', 'uninstall', 'query'] to be set"),
        ("--config-name nope", "Cannot find primary config 'nope'."),
        ("--config-path nowhere", "--config-path is not supported: conf/ is always read. Try --config-dir"),
        ("--config-dir nowhere seed=1", "--config-dir nowhere is not a folder."),
        ("hydra.searchpath=[nowhere]", "provider=hydra.searchpath in command-line, path=nowhere is not available."),
        ("hydra.nope=1", "Could not override 'hydra.nope'."),
        ("-m hydra.verbose=true,false", "Sweeping over Hydra's configuration is not supported"),
        ("hydra/sweeper=basi", "hydra/sweeper=basi does not exist. Did you mean hydra/sweeper=basic?"),
        ("--cfg job optim.lrr=1", "optim.lrr is not a setting. Did you mean optim.lr?"),
        ("--experimental-rerun nowhere", "--experimental-rerun is not supported: it opens a pickle file."),
    ],
)
def test_what_hydra_refuses_is_one_line_and_exit_code_2(command: Command, line: str, message: str) -> None:
    done = command("train.py", *line.split(), check=2)
    assert done.stderr.startswith(message)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


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
    """A folder of somebody's own configs, outside the repository."""
    folder = workspace / "my configs"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment/mine.yaml").write_text(MINE)
    (folder / "mine.yaml").write_text("defaults:\n  - train\n  - _self_\nseed: 7\n")
    return folder


@pytest.mark.parametrize(
    "flags", [["--config-dir", "my configs"], ["--config-dir=my configs"], ["hydra.searchpath=['my configs']"]]
)
def test_experiments_outside_the_repository_run(command: Command, configs: Path, flags: list[str]) -> None:
    done = command("train.py", *flags, "experiment=mine", "run_dir=run", "output=full")
    assert "Test perplexity" in done.stdout
    assert OmegaConf.load(configs.parent / "run/config.yaml").model.hidden_size == 12


def test_another_primary_config_runs(command: Command, configs: Path) -> None:
    command(
        "train.py", "--config-dir", str(configs), "--config-name=mine", "experiment=mine", "run_dir=run", "output=full"
    )
    assert OmegaConf.load(configs.parent / "run/config.yaml").seed == 7


def test_a_group_of_ones_own_is_added_with_a_plus_sign(configs: Path) -> None:
    (configs / "overlay").mkdir()
    (configs / "overlay/slow.yaml").write_text("# @package _global_\noptim: {lr: 0.01}\n")

    def line(*overrides: str) -> CommandLine[TrainConfig]:
        return CommandLine(["--config-dir", str(configs), *overrides], name="train", schema=TrainConfig)

    assert line("+overlay=slow").config.optim.lr == 0.01
    with pytest.raises(UserError, match=r"overlay=slwo does not exist\. Did you mean overlay=slow\?"):
        line("+overlay=slwo").check()


@pytest.mark.parametrize("flags", [["--config-dir", "my configs"], ["hydra.searchpath=['my configs']"]])
def test_mistakes_in_and_about_the_users_own_configs(command: Command, configs: Path, flags: list[str]) -> None:
    experiments = configs / "experiment"
    done = command("train.py", *flags, "experiment=mien", "seed=x", "+unknown=1", check=2)
    first, second, third = done.stderr.splitlines()
    assert first.startswith("experiment=mien does not exist. Did you mean experiment=mine? The options of experiment ")
    assert second.startswith("unknown is not a setting. ")
    assert third == "seed must be a whole number, at least 0; got 'x'. Try seed=1"

    (experiments / "mine.yaml").write_text(MINE + "optim: {lrr: 1}\n")
    done = command("train.py", *flags, "experiment=mine", "seed=x", check=2)
    assert done.stderr.splitlines()[0] == "optim.lrr is not a setting. Did you mean optim.lr?"
    for text in (MINE.replace("zipf", "nowhere"), MINE + "seed: [1,\n", MINE + "seed: ${nowhere}\n", "- 1\n"):
        (experiments / "mine.yaml").write_text(text)
        done = command("train.py", *flags, "experiment=mine", check=2)
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_hydras_output_directory_is_the_run_directory(command: Command, workspace: Path) -> None:
    command("train.py", *TINY, "trainer.max_steps=2", "hydra.run.dir=by/hydra")
    assert (workspace / "by/hydra/summary.json").exists()
    assert not (workspace / "runs").exists()


def test_the_settings_of_hydra_for_a_job_are_kept(command: Command, workspace: Path) -> None:
    """Changing into the output directory is one; a job that is not run through Hydra would ignore it."""
    command("train.py", *TINY, "trainer.max_steps=2", "run_dir=here", "hydra.run.dir=there", "hydra.job.chdir=true")
    assert (workspace / "there/here/summary.json").exists()
