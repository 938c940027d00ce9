"""The commands that a run, or a sweep for all of its runs, suggests at its end."""

import os
import shlex
from pathlib import Path

from lm.system.console import python_command
from lm.system.interrupt import IN_SWEEP


def in_sweep() -> bool:
    """Whether this run leaves it to a sweep to say what concerns all of its runs."""
    return bool(os.environ.get(IN_SWEEP))


def next_steps(run: Path, *more: str) -> list[str]:
    """Lines with the commands for a finished run and `more` commands; none in a run of a sweep."""
    if in_sweep():
        return []
    commands = [
        f"{python_command()} -m tensorboard.main --logdir {shlex.quote(str(run.parent))}",
        f"{python_command()} evaluate.py {shlex.quote(f'checkpoint={run}')}",
        f"{python_command()} -m lm.generate {shlex.quote(f'checkpoint={run}')}",
        *more,
    ]
    return ["", "Next:", *(f"  {command}" for command in commands)]
