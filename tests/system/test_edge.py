"""The edge of every command: exit codes and messages when output, files or signals fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm import cli
from lm.config.schema import TrainConfig
from lm.system.errors import BUG, UserError, guarded
from lm.system.interrupt import ctrl_c_ends
from tests.conftest import ROOT
from tests.helpers.forks import Fork

PYTHON = f'"{sys.executable}"'
COMPARE = f"cd {ROOT}; {PYTHON} -m lm.compare"


def raising(error: BaseException) -> None:
    with guarded():
        raise error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("seed must be a number."), 2, "seed must be a number.\n"),
        (OSError(36, "File name too long", "x"), 2, "File name too long: x. Files written"),
        (MemoryError(), 2, "Out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"), 2, "Out of memory (DefaultCPU"),
        (ZeroDivisionError("ours"), 1, f"ZeroDivisionError: ours\n{BUG}\n"),
        (SystemExit(3), 3, ""),
    ],
)
def test_mistakes_and_bugs_differ(tmp_path: Path, error: BaseException, code: int, message: str) -> None:
    child = Fork(raising, error, folder=tmp_path)
    assert child.wait() == code
    assert message in child.err
    assert ("Traceback" in child.err, child.err.count(BUG)) == ((True, 1) if code == 1 else (False, 0))


def test_sweeps_continue_after_mistakes() -> None:
    with pytest.raises(UserError, match="one run"), guarded(in_sweep=True):
        raise UserError("one run")


PRINTS = "from lm.system.errors import guarded\nwith guarded():\n print('x' * 100_000)\n print('y')"


@pytest.mark.parametrize(
    ("redirect", "code", "message"),
    [
        ("| true", 128 + signal.SIGPIPE, ""),
        ("> /dev/full", 2, "No space left on device. Files written before are complete; fix that and run again.\n"),
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("> /dev/null 2> /dev/full", 0, ""),
    ],
)
def test_output_that_cannot_be_written(redirect: str, code: int, message: str) -> None:
    command = f'set -o pipefail; {PYTHON} -c "$0" {redirect}'
    done = subprocess.run(["bash", "-c", command, PRINTS], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (code, message)


@pytest.mark.parametrize("command", ["__main__ import main", "compare.__main__ import start"])
def test_help_that_cannot_be_written(command: str) -> None:
    program = f"import sys; from lm.{command} as start; sys.argv[1:] = ['--help']; start()"
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = [
        subprocess.run(
            ["bash", "-c", f'set -o pipefail; {PYTHON} -c "$0" {redirect}', program],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=variables,
        )
        for redirect in ("| true", "> /dev/full")
    ]
    assert [result.returncode for result in done] == [128 + signal.SIGPIPE, 2]
    assert [result.stderr.count("\n") for result in done] == [0, 1]


def pressed(by: str) -> None:
    """Press Ctrl-C where a library swallows the exception or raises another one."""
    with guarded():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if by == "AttributeError":
                raise AttributeError("of a half-constructed object") from None
        if by == "StopRequest":
            from lm.system.interrupt import StopRequest

            with StopRequest():
                Path("trained").touch()


@pytest.mark.parametrize("by", ["callback", "AttributeError", "StopRequest"])
def test_swallowed_ctrl_c_still_ends_the_command(tmp_path: Path, by: str) -> None:
    child = Fork(pressed, by, folder=tmp_path)
    assert (child.wait(), child.err) == (130, "interrupted\n")
    assert not (tmp_path / "trained").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [f"{COMPARE} {'x' * 300}", f"{COMPARE} nothing >&- 2>&-"])
def test_compare_has_the_same_edge(command: str) -> None:
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


# ---- stop requests ---------------------------------------------------------------------------------------------------


def press_ctrl_c(times: int) -> None:
    """Press Ctrl-C while working, then again while cleaning up."""
    with ctrl_c_ends():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            Path("clearing").touch()
            for _ in range(times - 1):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            Path("cleared").touch()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_exits_with_130_and_no_traceback(tmp_path: Path, times: int) -> None:
    child = Fork(press_ctrl_c, times, folder=tmp_path)
    assert child.wait() == 130, child.err
    assert (tmp_path / "clearing").exists()
    assert (tmp_path / "cleared").exists() == (times == 1)
    assert child.err == ("interrupted\n" if times == 1 else "")


@pytest.mark.parametrize("command", ["train.py", "-m lm.prepare", "-m benchmarks.step"])
def test_ctrl_c_during_imports(tmp_path: Path, command: str) -> None:
    """Also where C++ aborts if Python raises an exception."""
    code = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: os.abort()"
    for name in ("hydra", "torch"):
        (tmp_path / f"{name}.py").write_text(code)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, cwd=ROOT, env=variables)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def parse() -> None:
    sys.argv = ["train.py"]
    cli.sweep_settings = lambda _: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[assignment, return-value]
    cli.run(print, name="train", schema=TrainConfig)


def test_ctrl_c_before_the_command_is_composed(tmp_path: Path) -> None:
    child = Fork(parse, folder=tmp_path)
    assert (child.wait(), child.err) == (130, "interrupted\n")


def test_settings_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_ends():
        pass
    assert signal.getsignal(signal.SIGINT) is before
