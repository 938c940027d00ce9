"""Ctrl-C outside a run cleans up without a traceback, even if pressed repeatedly."""

import os
import signal
import time
from pathlib import Path

import pytest

from lm.system.interrupt import ctrl_c_ends
from tests.helpers.forks import Fork


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


def test_settings_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_ends():
        pass
    assert signal.getsignal(signal.SIGINT) is before
