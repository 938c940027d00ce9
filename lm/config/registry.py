"""Plug-ins: what can be chosen by name in a group (`output=full`, `data=text8`), and the settings each one takes.

A plug-in is one file, named like the option. It declares the settings and registers what makes the object:

    @dataclass
    class FullConfig(OutputConfig):
        ...

    @plugin("output", "full", FullConfig)
    class FullSoftmax(JointSoftmax):
        ...

The file is imported when its name is first asked for, so `--help` imports neither torch nor any plug-in.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

FOLDERS = {
    "data": "data/corpora",
    "output": "output/layers",
    "model": "model/cores",
    "input": "model/inputs",
    "optim": "optim/optimizers",
}
"""Where the plug-ins of each group are, below `lm/`."""
Target = TypeVar("Target", bound=Callable[..., Any])


class Plugin(NamedTuple):
    """A named option of a group."""

    settings: type
    target: Any
    """The class or function that was registered; what it promises is the contract of its group."""


_registered: dict[tuple[str, str], Plugin] = {}


def plugin(group: str, name: str, settings: type) -> Callable[[Target], Target]:
    """Register a class or function as `group=name`."""

    def register(target: Target) -> Target:
        _registered[group, name] = Plugin(settings, target)
        return target

    return register


@cache
def plugin_names(group: str) -> list[str]:
    """All names of a group, without importing any."""
    folder = Path(__file__).resolve().parents[1] / FOLDERS[group]
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def find_plugin(group: str, name: str) -> Plugin:
    """The plug-in of that name; KeyError if there is none."""
    if (group, name) not in _registered:
        if name not in plugin_names(group):
            raise KeyError(name)
        import_module(f"lm.{FOLDERS[group].replace('/', '.')}.{name}")
    return _registered[group, name]


def plugins_with(group: str, setting: str) -> list[str]:
    """Names of the plug-ins of a group that have a setting."""
    return [name for name in plugin_names(group) if setting in get_type_hints(find_plugin(group, name).settings)]


def is_group(key: str) -> bool:
    return key in FOLDERS
