"""The command line: all mistakes reported at once, in plain words, before the job starts.

Hydra composes the config. Of a mistaken command line it reports only the first mistake, suggests a `+` that it then
ignores, and exits with code 1. So mistakes are looked for here: unknown groups, options and keys (also behind `+`),
wrong types, broken rules. Paths are taken as typed, whatever characters they contain, and quoted for Hydra's grammar.
"""

import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast, get_type_hints

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobStatus, run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from lm.config.registry import find_plugin, is_group, plugin_names
from lm.config.validate import close_to, find_problems, flatten, make_config, typed, unknown_key
from lm.system.console import printable
from lm.system.errors import UserError, in_words
from lm.system.interrupt import Stopped, ctrl_c_ends, end_with_launcher

CONF = Path(__file__).resolve().parents[2] / "conf"
"""`train` and `prepare` with their groups; the commands without groups are in its folder `commands`, where a setting
may be called like a group (`input`)."""
VERBATIM = """
    arpa cache_boundary checkpoint data.archive data.dir data.sha256 data.test data.train data.url data.valid
    data.vocabulary init input json out output.cost_model prompt resume run_dir
""".split()  # noqa: SIM905
BASIC = "basic"
"""The name of Hydra's own sweeper and of its own launcher."""
Schema = TypeVar("Schema")
Job = Callable[[Schema, list[str]], float | None]


def command(
    job: Job[Schema],
    *,
    name: str,
    schema: type[Schema],
    sweep: Callable[["CommandLine[Schema]"], int] | None = None,
) -> None:
    """Run `job` on the config composed from `conf/NAME.yaml` and the command line; exit 2 on a user's mistake.

    The job also receives the overrides, because a resumed run must know which settings were given explicitly. What it
    returns is what a sweeper such as Optuna minimises. `sweep` replaces Hydra's basic sweeper and returns an exit code.
    """
    end_with_launcher()  # before torch is imported, which takes seconds
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then passes exceptions on instead of printing them
    # OpenMP threads that spin while they wait make a step two to five times slower on a shared machine; on two idle
    # cores they would save 8 % of a large step. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with ctrl_c_ends():
            code = CommandLine(sys.argv[1:], name=name, schema=schema).run(job, sweep)
    except BrokenPipeError:
        _leave_quietly()
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        code = 2
        if _reports_here(error):
            print(printable(in_words(error), keep="\n"), file=sys.stderr)
    except Stopped as stopped:
        code = stopped.code
    if code:
        sys.exit(code)


def compose(arguments: Sequence[str], *, name: str, schema: type[Schema]) -> Schema:
    """The checked config of a command line, without running a job."""
    return CommandLine(arguments, name=name, schema=schema).config


class CommandLine(Generic[Schema]):
    """Hydra's flags and the overrides of one command line, and the configs composed from them."""

    def __init__(self, arguments: Sequence[str], *, name: str, schema: type[Schema]) -> None:
        is_plain = (CONF / "commands" / f"{name}.yaml").exists()
        quoted = [a if a.startswith("input=") and not is_plain else quote_verbatim(a) for a in arguments]
        self.as_typed = dict(zip(quoted, arguments, strict=True))
        self.flags = get_args_parser().parse_intermixed_args(quoted)
        self.overrides: list[str] = self.flags.overrides
        self.name, self.schema = self.flags.config_name or name, schema

    def run(self, job: Job[Schema], sweep: Callable[["CommandLine[Schema]"], int] | None) -> int:
        """Do what the command line asks for; the exit code."""

        def task(values: DictConfig) -> float | None:
            given = cast("list[str]", OmegaConf.to_container(HydraConfig.get().overrides.task))
            overrides = [self.as_typed.get(text, text) for text in given]
            return job(_in_own_directory(make_config(values, self.schema)), overrides)

        flags = self.flags
        if flags.experimental_rerun:
            raise UserError("--experimental-rerun is not supported: it opens a pickle file. Try resume=runs/NAME")
        if flags.config_path:
            raise UserError("--config-path is not supported: conf/ is always read. Try --config-dir to add a folder")
        if flags.cfg or flags.info:
            self.check()
        if flags.help or flags.hydra_help or flags.shell_completion or flags.resolve or flags.cfg or flags.info:
            with _in_one_paragraph(f"{' '.join(sys.argv[1:])}: "):
                _run_hydra(flags, get_args_parser(), task, str(self.folder), self.name)
        elif not self.is_multirun:
            _ = self.config  # reports mistakes before the job imports torch
            self.composed.hydra.mode = RunMode.RUN
            callbacks = Callbacks(self.composed)
            callbacks.on_run_start(config=self.composed, config_name=self.name)
            context = HydraContext(config_loader=self.loader, callbacks=callbacks)
            result = run_job(task, self.composed, "hydra.run.dir", None, context)  # composes nothing again
            callbacks.on_run_end(config=self.composed, config_name=self.name, job_return=result)
            if result.status is JobStatus.FAILED:
                raise result._return_value  # the public `return_value` would print the overrides first
        elif self.option("hydra/sweeper") == BASIC and sweep is not None:
            return sweep(self)
        else:
            self.check()
            folder = cast(Any, OmegaConf.to_container(self.composed.hydra.sweep))["subdir"]  # resolved in a job only
            if folder == "." and self.composed.get("run_dir", "") is None:  # each job needs a directory of its own
                flags.overrides.append(time.strftime("hydra.sweep.subdir=sweep-%Y-%m-%d-%H-%M-%S/${hydra.job.num}"))
            _run_hydra(flags, get_args_parser(), task, str(self.folder), self.name)
        return 0

    # ---- composing ------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the command's config is."""
        return CONF / "commands" if (CONF / "commands" / f"{self.name}.yaml").exists() else CONF

    @cached_property
    def loader(self) -> ConfigLoader:
        """Hydra's loader over `conf/` and the folder of --config-dir."""
        path = create_config_search_path(str(self.folder))
        if folder := self.flags.config_dir:
            if not Path(folder).is_dir():
                raise UserError(f"--config-dir {folder} is not a folder.")
            path.prepend("command-line", f"file://{Path(folder).absolute()}", SearchPathQuery(provider="schema"))
        version.setbase("1.3")
        return Hydra(self.name, ConfigLoaderImpl(path)).config_loader

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        return OverridesParser.create(self.loader).parse_overrides(list(overrides))

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The whole config, Hydra's own node included."""
        with _in_one_paragraph():
            config = self.loader.load_configuration(self.name, list(overrides), RunMode.MULTIRUN)
            HydraConfig.instance().set_config(config)
            OmegaConf.set_readonly(config.hydra, False)
        return config

    @contextmanager
    def all_mistakes(self) -> Iterator[None]:
        """Where one mistake is found, report all."""
        try:
            yield
        except UserError:
            self.check()
            raise

    @cached_property
    def composed(self) -> DictConfig:
        with self.all_mistakes():
            return self.compose(self.overrides)

    @cached_property
    def config(self) -> Schema:
        """The typed config of the one run that the command line asks for."""
        with self.all_mistakes():
            values = _task_values(self.composed)
            if swept := [str(o.input_line) for o in self.parse(self.overrides) if o.is_sweep_override()]:
                raise UserError(f"{' '.join(swept)}: several values need -m, which starts a run for each.")
            return make_config(values, self.schema)

    def variant(self, overrides: Sequence[str]) -> Schema:
        """The typed config of one run of a sweep."""
        return make_config(_task_values(self.compose(overrides)), self.schema)

    @property
    def is_multirun(self) -> bool:
        """Whether several runs are asked for, by -m or by an experiment that defines its sweep."""
        return self.flags.multirun or self.composed.hydra.mode is RunMode.MULTIRUN

    @property
    def config_flags(self) -> list[str]:
        """The flags that say where configs are found, for a run in a process of its own."""
        given = {"--config-name": self.flags.config_name, "--config-dir": self.flags.config_dir}
        return [f"{flag}={value}" for flag, value in given.items() if value]

    def option(self, group: str) -> str:
        """The chosen option of a group."""
        return str(self.composed.hydra.runtime.choices[group])

    # ---- looking for mistakes -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise one UserError that lists everything wrong with the overrides."""
        problems: list[str] = []
        choices: list[list[str]] = []
        settings: list[list[str]] = []
        search_path = [text for text in self.overrides if text.startswith("hydra.searchpath=")]
        plain = self.compose(search_path)
        defaults = plain.hydra.runtime.choices
        others = self.loader.list_groups("")  # that `+group=option` may add to the defaults
        for text in self.overrides:
            try:
                (override,) = self.parse([text])
                values, key = _samples(override), override.key_or_group
                in_group = key in defaults or (override.is_add() and key in others)
                if in_group and not isinstance(override.value(), dict):
                    if override.is_add() and key in defaults:
                        raise UserError(f"+{key}: the group has an option already. Try it without the plus sign.")
                    options = self.loader.get_group_options(key, config_name=self.name, overrides=search_path)
                    problems += (unknown := list(_unknown_options(key, values, sorted(options))))
                    choices += [] if unknown else [values]
                else:
                    (choices if override.is_hydra_override() else settings).append(values)
            except UserError as error:
                problems.append(str(error))
            except (HydraException, OmegaConfBaseException):
                key, equals, _ = text.partition("=")
                hint = f"The value needs two pairs of quotes: \"{key}='...'\"" if equals else "Settings are key=value."
                problems.append(f"{text} is not understood. {hint}")
        bases = {tuple(search_path): plain}  # composing takes far longer than laying settings over it
        for line in _variations(choices + settings):
            chosen, rest = tuple(line[: len(choices)]), line[len(choices) :]
            if chosen not in bases:
                bases[chosen] = self.compose(chosen)
            problems += self._setting_problems(deepcopy(bases[chosen]), rest)
        if problems:
            raise UserError("\n".join(dict.fromkeys(problems)))

    def _setting_problems(self, base: DictConfig, settings: Sequence[str]) -> Iterator[str]:
        """What is wrong with `key=value` settings without sweeps, given the config of the options chosen."""
        defaults = flatten(_task_values(base))
        known = {*defaults, *(key.partition(".")[0] for key in defaults)}
        sound = []
        for override in self.parse(settings):
            key = override.key_or_group
            if key not in known:
                yield _unknown_setting(key, defaults if "." in key else known, base.hydra.runtime.choices)
            elif override.is_delete():
                hint = f" Try {key}={typed(defaults[key])}" if key in defaults else ""
                yield f"~{key}: settings cannot be removed.{hint}"
            elif override.is_add():
                yield f"+{key}: the setting exists already. Try it without the plus sign."
            else:
                sound.append(override)
        with _in_one_paragraph():
            ConfigLoaderImpl._apply_overrides_to_config(sound, base)
        yield from find_problems(_task_values(base), self.schema, defaults=defaults)


def quote_verbatim(argument: str) -> str:
    """Quote the value of a path-like key, so that Hydra's grammar takes it as it was typed."""
    key, equals, value = argument.partition("=")
    if not equals or key not in VERBATIM or value in ("", "null"):
        return argument
    # Backslashes count in Hydra only in front of a quote, and in OmegaConf only in front of "${".
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    value = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"{key}='{value}'"


def each_value(override: Override) -> list[str]:
    """The override once for each value of its sweep, or as it is."""
    line, key = str(override.input_line), override.get_key_element()
    if not override.is_sweep_override():
        return [line]
    if override.is_interval_sweep():
        raise UserError(f"{line}: an interval has no list of values. Try {key}=choice(...) or range(...)")
    if values := [f"{key}={value}" for value in override.sweep_string_iterator()]:
        return values
    raise UserError(f"{line} matches nothing, so there is nothing to run.")


def _samples(override: Override) -> list[str]:
    """The values to check: of a range or an interval its ends, else all."""
    if override.is_interval_sweep():
        ends, key = cast(Any, override.value()), override.get_key_element()
        return [f"{key}={ends.start}", f"{key}={ends.end}"]
    values = each_value(override)
    return [values[0], values[-1]] if override.is_range_sweep() else values


def _task_values(config: DictConfig) -> dict[str, Any]:
    """The command's own settings, without Hydra's."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with _in_one_paragraph():
        return cast("dict[str, Any]", OmegaConf.to_container(own, resolve=True))


def _in_own_directory(config: Schema) -> Schema:
    """The config with Hydra's output directory as its run directory, where one is set; no two jobs share one."""
    hydra, given = HydraConfig.get(), getattr(config, "run_dir", "")
    if given is None and Path(hydra.runtime.output_dir) != Path(hydra.runtime.cwd):
        config.run_dir = hydra.runtime.output_dir  # type: ignore[attr-defined]
    elif given and hydra.mode is RunMode.MULTIRUN:
        config.run_dir = str(Path(given) / str(hydra.job.num))  # type: ignore[attr-defined]
    return config


def _unknown_setting(key: str, known: Iterable[str], chosen: Mapping[str, Any]) -> str:
    group, _, field = key.partition(".")
    names = plugin_names(group) if is_group(group) else []
    owners = [name for name in names if field in get_type_hints(find_plugin(group, name).settings)]
    if owners and group in chosen:
        return f"{key} is not a setting of {group}={chosen[group]}; it belongs to {group}={' or '.join(owners)}."
    return unknown_key(key, known)


def _unknown_options(group: str, choices: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    for option in (choice.partition("=")[2] for choice in choices):
        if option not in options:
            hint = close_to(option, options)
            yield (
                f"{group}={option} does not exist. "
                + (f"Did you mean {group}={hint}? " if hint else "")
                + f"The options of {group} are: {', '.join(options)}."
            )


def _variations(choices: list[list[str]]) -> Iterator[list[str]]:
    first = [options[0] for options in choices]
    yield first
    for i, options in enumerate(choices):
        for option in options[1:]:
            yield [*first[:i], option, *first[i + 1 :]]


@contextmanager
def _in_one_paragraph(prefix: str = "") -> Iterator[None]:
    """What Hydra, OmegaConf or the YAML parser has against a config, as a UserError without their listings."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="provider=.* is not available")  # a folder of hydra.searchpath
            yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, UserWarning) as error:
        text = re.split(r"\n\s*(?:object_type=|Config search path|Search path)", str(error) or str(error.__cause__))[0]
        raise UserError(prefix + " ".join(text.replace("full_key:", "in").split())) from error


def _reports_here(error: Exception) -> bool:
    """Under torchrun all ranks find the same mistake, and one of them prints it."""
    report_here = error.report_here if isinstance(error, UserError) else None
    is_first = os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"
    return is_first if report_here is None else report_here


def _leave_quietly() -> NoReturn:
    """Whoever read our output has gone, as in `| head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)
