"""Plug-ins: the options of each group (`output=full`, `data=text8`) and their settings classes.

A plug-in file is any file in its group's folder that registers one or more options:

    @dataclass
    class FullConfig(OutputConfig):
        ...

    @plugin("output", "full", FullConfig)
    class FullSoftmax(JointSoftmax):
        ...

Files are searched for these decorators as text. Only the file of a requested option is imported, so `--help` imports
neither torch nor any plug-in.
"""

import re
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
"""Folder of each group's plug-ins, below `lm/`."""
Target = TypeVar("Target", bound=Callable[..., Any])


class Plugin(NamedTuple):
    """An option of a group."""

    settings: type
    target: Any
    """The registered class or function, which implements its group's contract."""


_registered: dict[tuple[str, str], Plugin] = {}


def plugin(group: str, name: str, settings: type) -> Callable[[Target], Target]:
    """Register a class or function as `group=name`."""

    def register(target: Target) -> Target:
        _registered[group, name] = Plugin(settings, target)
        return target

    return register


@cache
def _modules(group: str) -> dict[str, str]:
    """Map each option of a group to its module, without importing any."""
    folder = Path(__file__).resolve().parents[1] / FOLDERS[group]
    package = f"lm.{FOLDERS[group].replace('/', '.')}"
    decorator = re.compile(rf'^@plugin\(\s*"{group}",\s*"([^"]+)"', re.MULTILINE)
    return {
        name: f"{package}.{path.stem}"
        for path in sorted(folder.glob("*.py"))
        for name in decorator.findall(path.read_text(encoding="utf-8"))
    }


def plugin_names(group: str) -> list[str]:
    """List all options of a group without importing any."""
    return sorted(_modules(group))


def find_plugin(group: str, name: str) -> Plugin:
    """Return the plug-in that registers `group=name`; KeyError if there is none."""
    if (group, name) not in _registered:
        import_module(_modules(group)[name])
    return _registered[group, name]


def settings_of(target: Any) -> tuple[str, Any]:
    """Return the name and the settings class that a plug-in was registered with."""
    return next((name, plugin.settings) for (_, name), plugin in _registered.items() if plugin.target is target)


def plugins_with(group: str, setting: str) -> list[str]:
    """Return the plug-ins of a group that have this setting."""
    return [name for name in plugin_names(group) if setting in get_type_hints(find_plugin(group, name).settings)]
