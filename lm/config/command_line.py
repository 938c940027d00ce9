"""The command line: every mistake told at once, in plain words, before the job is run.

A sound command line for one run is composed by Hydra and run. Of a mistaken one Hydra tells only the first mistake, in
its own words, suggests a `+` that it then ignores, and exits with code 1. So those are looked for here: unknown groups,
options and keys (also behind `+`), wrong types, broken rules. Paths are taken as typed, whatever characters they hold,
and quoted for Hydra's grammar.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lm.config.validate import close_to, find_problems, flatten, make_config, typed, unknown_key
from lm.config.variants import owners
from lm.system.console import printable
from lm.system.errors import UserError, in_words
from lm.system.interrupt import Stopped, end_with_launcher

CONF = Path(__file__).resolve().parents[2] / "conf"
VERBATIM = """
    checkpoint data.archive data.dir data.sha256 data.test data.train data.url data.valid input json out
    output.cost_model prompt resume run_dir
""".split()  # noqa: SIM905
ANSWERED_BY_HYDRA = ("--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc")
"""With one of these Hydra runs no job, and what else stands on the command line need not be a setting."""
NOT_COMPOSED = (HydraException, OmegaConfBaseException, ValueError)
"""What Hydra raises where a command line cannot be composed; ValueError for `model=null`."""
ONE_RUN = "hydra.mode=RUN"
"""Keeps an experiment from starting its sweep; so the runs of a sweep are started."""
Schema = TypeVar("Schema")


def command(
    job: Callable[[Schema, list[str]], None],
    *,
    name: str,
    schema: type[Schema],
    sweep: Callable[[list[str], Path], int] | None = None,
) -> None:
    """Run `job` on the config that `conf/NAME.yaml` and the command line make; exit 2 on a user's mistake.

    The job is also told the overrides themselves, because a resumed run must know which settings were asked for.
    Where several runs are asked for, `sweep` gets the overrides and the folder for them, and gives the exit code.
    """
    end_with_launcher()  # before torch is imported, which takes seconds
    sys.argv[1:] = [quote_verbatim(argument) for argument in sys.argv[1:]]
    # Hydra then passes on what a job raises, instead of printing it its own way and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Compute threads that spin while they wait for each other make a step two to five times slower as soon as another
    # process wants a core; on two idle cores they would save 8 % of a large step. Said before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    mistakes: list[Exception] = []

    def run_job(values: DictConfig) -> None:
        run(make_config(values, schema), list(HydraConfig.get().overrides.task))

    def run(config: Schema, overrides: list[str]) -> None:
        try:
            job(config, overrides)
        except BrokenPipeError:
            _leave_quietly()  # and not through Hydra, which would not be quiet
        except (UserError, OSError) as error:
            mistakes.append(error)

    try:
        if (plain := compose_plainly(sys.argv[1:], name=name, schema=schema)) is not None:
            run(*plain)
        else:
            if not any(a in ANSWERED_BY_HYDRA for a in sys.argv[1:]):
                overrides, folder = asked(sys.argv[1:], name=name)
                check_overrides(overrides, name=name, schema=schema)
                if sweep is not None and folder is not None:
                    sys.exit(sweep(overrides, folder))
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(run_job)()
    except BrokenPipeError:
        _leave_quietly()
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        mistakes.append(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Stopped as stopped:
        sys.exit(stopped.code)
    if mistakes:
        told = [printable(in_words(mistake), keep="\n") for mistake in mistakes if _reports_here(mistake)]
        print("".join(f"{text}\n" for text in told), end="", file=sys.stderr)
        sys.exit(2)


def _leave_quietly() -> NoReturn:
    """Whoever read our output has gone, as in `| head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


def compose_plainly(arguments: Sequence[str], *, name: str, schema: type[Schema]) -> tuple[Schema, list[str]] | None:
    """The config of a sound command line for one run that asks nothing of Hydra itself, and its overrides; else None.

    It takes one composition, where finding all mistakes and Hydra's own way of starting a job take six of them.
    """
    overrides = [argument for argument in arguments if argument != ONE_RUN]
    if any(argument.startswith(("-", "+", "~", "hydra")) for argument in overrides):
        return None
    try:
        with composer():
            values = hydra.compose(name, list(arguments), return_hydra_config=True)
        if values.hydra.mode is RunMode.MULTIRUN:
            return None
        with open_dict(values):
            del values.hydra
        return make_config(values, schema), overrides
    except (UserError, *NOT_COMPOSED):
        return None  # told by those who look for every mistake


def compose(arguments: Sequence[str], *, name: str, schema: type[Schema]) -> Schema:
    """The config that a command line makes, checked as a command's is, where Hydra does not run the job."""
    arguments = [quote_verbatim(argument) for argument in arguments]
    check_overrides(arguments, name=name, schema=schema)
    with composer():
        return make_config(hydra.compose(name, list(arguments)), schema)


def _reports_here(error: Exception) -> bool:
    """Under torchrun all ranks find the same mistake, and one of them says it."""
    report_here = error.report_here if isinstance(error, UserError) else None
    is_first = os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"
    return is_first if report_here is None else report_here


def quote_verbatim(argument: str) -> str:
    """Quote the value of a path-like key, so that Hydra's grammar takes it as it was typed."""
    key, equals, value = argument.partition("=")
    if not equals or key not in VERBATIM or value in ("", "null"):
        return argument
    # Backslashes count in Hydra only in front of a quote, and in OmegaConf only in front of "${".
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    value = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"{key}='{value}'"


def check_overrides(arguments: Sequence[str], *, name: str, schema: type) -> None:
    """Raise one UserError that names everything wrong with the command line."""
    problems: list[str] = []
    with composer() as loader:
        groups = _groups(name)
        choices: list[list[str]] = []
        settings: list[Override] = []
        for argument in arguments:
            try:
                override = OverridesParser.create(loader).parse_override(argument)
            except (HydraException, OmegaConfBaseException):
                problems.append(_not_an_override(argument))
                continue
            key = override.key_or_group
            if key in groups and not isinstance(override.value(), dict):
                problems += (found := list(_group_problems(override, sorted(loader.get_group_options(key)))))
                choices += [] if found else [each_value(override)]
            elif override.is_hydra_override() or key.startswith("hydra/"):
                choices.append([argument])
            else:
                settings.append(override)
        # A sweep is checked value by value: the first of each together, then each other one in its place.
        for options in _variations(choices):
            problems += _setting_problems(options, settings, name=name, schema=schema)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


@cache
def _groups(name: str) -> frozenset[str]:
    """The groups from which a command's config takes an option each."""
    return frozenset(hydra.compose(name, return_hydra_config=True).hydra.runtime.choices)


def _setting_problems(chosen: list[str], settings: list[Override], *, name: str, schema: type) -> list[str]:
    """What is wrong with the `key=value` settings, given the groups' chosen options."""
    without = hydra.compose(name, chosen)
    base = flatten(OmegaConf.to_container(without, resolve=False))  # type: ignore[arg-type]
    problems = []
    sound: list[list[str]] = []
    for override in settings:
        key = override.key_or_group
        if not any(known == key or known.startswith(f"{key}.") for known in base):
            problems.append(_unknown_setting(key, base))
        elif override.is_delete():
            hint = f" Try {key}={typed(base[key])}" if key in base else ""
            problems.append(f"~{key}: settings cannot be removed.{hint}")
        elif override.is_add():
            problems.append(f"+{key}: the setting exists already. Try it without the plus sign.")
        else:
            sound.append(each_value(override))
    for assignment in _variations(sound):
        try:
            composed = hydra.compose(name, chosen + assignment) if assignment else without
            problems += find_problems(OmegaConf.to_container(composed, resolve=True), schema, defaults=base)
        except (HydraException, OmegaConfBaseException) as error:
            problems.append(str(error).splitlines()[0])
    return problems


def _unknown_setting(key: str, base: dict[str, Any]) -> str:
    group, _, field = key.partition(".")
    if (names := owners(group, field)) and (chosen := base.get(f"{group}.name")):
        return f"{key} is not a setting of {group}={chosen}; it belongs to {group}={' or '.join(names)}."
    groups = {known.partition(".")[0] for known in base if "." in known}
    if "." not in key and key not in groups and (near := close_to(key, groups)):
        return f"{key} is not a group of settings. Did you mean {near}?"
    return unknown_key(key, base)


def _group_problems(override: Override, options: list[str]) -> Iterator[str]:
    group = override.key_or_group
    for choice in each_value(override):
        option = choice.partition("=")[2]
        if option not in options:
            hint = close_to(option, options)
            yield (
                f"{group}={option} does not exist. "
                + (f"Did you mean {group}={hint}? " if hint else "")
                + f"The options of {group} are: {', '.join(options)}."
            )


def _not_an_override(argument: str) -> str:
    if "=" not in argument:
        return f"{argument} is not understood: settings are given as key=value, options as group=option."
    key = argument.partition("=")[0]
    return (
        f"{argument} is not understood: the value holds characters with a meaning of their own. "
        f"Put it in two pairs of quotes, as in \"{key}='...'\""
    )


def each_value(override: Override) -> list[str]:
    """The override once for each value of its sweep, or as it is."""
    if not override.is_sweep_override():
        assert override.input_line is not None
        return [override.input_line]
    if not override.is_discrete_sweep():
        key = override.get_key_element()
        raise UserError(
            f"{override.input_line}: an interval has no list of values. Try {key}=choice(...) or range(...)"
        )
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _variations(choices: list[list[str]]) -> Iterator[list[str]]:
    first = [options[0] for options in choices]
    yield first
    for i, options in enumerate(choices):
        for option in options[1:]:
            yield [*first[:i], option, *first[i + 1 :]]


def asked(arguments: Sequence[str], *, name: str) -> tuple[list[str], Path | None]:
    """The overrides; where they ask for a sweep, by -m or by an experiment that carries its own, also its folder."""
    from hydra._internal.utils import get_args_parser

    given = get_args_parser().parse_args(list(arguments))
    with composer() as loader:
        try:
            # As Hydra finds out: https://hydra.cc/docs/tutorials/basic/running_your_app/multi-run
            composed = loader.load_configuration(
                name, given.overrides, run_mode=RunMode.MULTIRUN, validate_sweep_overrides=False
            ).hydra
        except NOT_COMPOSED:  # a mistake, which is told by those who look for it
            return given.overrides, None
    shown = given.cfg or given.info or given.shell_completion
    if shown or not (given.multirun or composed.mode is RunMode.MULTIRUN):
        return given.overrides, None
    carried = [f"{key}={value}" for key, value in (composed.sweeper.params or {}).items()]
    return [*carried, *given.overrides], Path(composed.sweep.dir)


@contextmanager
def composer() -> Iterator[Any]:
    """Hydra's composer over `conf/`."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()
