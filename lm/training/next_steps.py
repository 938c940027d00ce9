"""Commands suggested at the end of a run."""

import shlex
from pathlib import Path

from lm.system.console import own_command, python_command
from lm.system.interrupt import in_sweep


def next_steps(run: Path, *more: str) -> list[str]:
    """Return lines that suggest commands for a finished run; empty inside a sweep."""
    if in_sweep():
        return []
    commands = [
        f"{python_command()} -m tensorboard.main --logdir {shlex.quote(str(run.parent))}",
        f"{own_command('evaluate')} {shlex.quote(f'checkpoint={run}')}",
        f"{own_command('generate')} {shlex.quote(f'checkpoint={run}')}",
        *more,
    ]
    return ["", "Next:", *(f"  {command}" for command in commands)]


def resume_command(run: Path) -> str:
    return f"{own_command('train')} {shlex.quote(f'resume={run}')}"
