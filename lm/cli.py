"""The command line: Hydra's, with mistakes explained in plain words and exit code 2.

    @command("train", TrainConfig)
    def start(config: TrainConfig, overrides: list[str]) -> float | None: ...

    start()

Hydra composes the config and starts the job. `command` turns the composed values into typed settings. `run` catches
what Hydra or the job raises. If Hydra cannot compose the command line, `find_mistakes` looks at each override and lists
everything that is wrong, not just the first exception.
"""

import argparse
import atexit
import functools
import gc
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from lm.system.interrupt import ctrl_c_ends, end_with_launcher

with ctrl_c_ends():  # these imports take a while
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException
    from hydra.experimental.callback import Callback
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    from lm.config import schema_source
    from lm.config.groups import FOLDERS, plugins_with
    from lm.config.validate import close_to, find_problems, flatten, make_config, quoted, typed, unknown_key
    from lm.system.console import PROGRAM
    from lm.system.errors import UserError, guarded

HERE = Path(__file__).resolve().parent
CONF = str(HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf")
"""Folder of the YAML files: beside the package in the repository, inside it when installed."""
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError, UserWarning)
LONGEST_NAME = 60
"""Maximum length of a directory name; file systems allow about 250 bytes."""
Schema = TypeVar("Schema")
Job = Callable[[Any, list[str]], float | None]


# ---- running a command -----------------------------------------------------------------------------------------


def command(
    name: str, schema: type[Any], *, after_sweep: Callable[[Path], None] | None = None
) -> Callable[[Job], Callable[[], None]]:
    """Decorate a job that takes typed settings and overrides; the result runs it on sys.argv.

    The job's return value is what a sweeper such as Optuna minimizes.
    """
    has_groups = name not in schema_source.COMMANDS  # the other configs need no YAML file

    def decorate(job: Job) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=CONF if has_groups else None, config_name=name)
        @functools.wraps(job)
        def call(values: DictConfig) -> float | None:
            with guarded(in_sweep=HydraConfig.get().mode is RunMode.MULTIRUN):
                try:
                    return job(_in_output_dir(make_config(values, schema)), list(HydraConfig.get().overrides.task))
                except OmegaConfBaseException as error:
                    raise UserError(one_paragraph(error)) from None

        return functools.partial(run, call, name=name, schema=schema, after_sweep=after_sweep)

    return decorate


def run(
    main: Callable[[], Any], *, name: str, schema: type[Any], after_sweep: Callable[[Path], None] | None = None
) -> None:
    """Run a `hydra.main` function on sys.argv; exit 2 on a user's mistake, 1 if a run of a sweep failed.

    `after_sweep` is called with a sweep's folder after its runs, even if some failed.
    """
    end_with_launcher()
    atexit.register(gc.freeze)  # half a second less at exit: the last collection skips what torch and others imported
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises exceptions instead of printing them
    # Spinning OpenMP threads make a step two to five times slower on a shared machine. On two idle cores they would
    # save 8% of a large step. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with guarded():
        prepare_hydra()
        flags = parse_flags(sys.argv[1:])
        multirun = ["-m"] if flags.multirun else []
        sys.argv[1:] = [*multirun, *flags.rest, *flags.overrides, *sweep_settings(flags.overrides)]
        try:
            if re.search("[\ud800-\udfff]", "".join(sys.argv)):
                raise UserError("Settings must be UTF-8; got other bytes. Rename the file or folder.")
            others = schema_source.COMMANDS.keys() - {name, f"{name}{schema_source.SUFFIX}"}
            if {flags.config_name, f"{flags.config_name}{schema_source.SUFFIX}"} & others:
                raise UserError(f"--config-name={flags.config_name} belongs to another command. Omit it.")
            if flags.help:
                from lm.config.reference import help_text

                documentation = sys.modules[main.__module__].__doc__ or ""
                if sys.argv[0] == PROGRAM:
                    documentation = re.sub(r"(?m)^python (?:-m lm\.)?(\w+)(?:\.py)?", rf"{PROGRAM} \1", documentation)
                print(help_text(documentation, compose(flags, name), schema, conf=Path(CONF)))
                return
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message="provider=.* is not available")  # hydra.searchpath
                    main()
            finally:
                if after_sweep is not None and SweepFolder.noted is not None:
                    after_sweep(SweepFolder.noted)
        except SystemExit as stop:  # with --cfg, Hydra ends with 1 if there is no such --package
            sys.exit(2 if flags.cfg and stop.code else stop.code)
        except HYDRA_ERRORS as error:
            raise UserError("\n".join(find_mistakes(flags, name, schema)) or one_paragraph(error)) from None
        except (ValueError, RuntimeError, ImportError) as error:
            if not _raised_by_hydra(error):
                raise
            raise UserError(one_paragraph(error)) from None


def prepare_hydra() -> None:
    """Register the settings' defaults and the resolver for directory names."""
    schema_source.register()
    SweepFolder.noted = None
    OmegaConf.register_new_resolver("slug", slug, replace=True)


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse flags and overrides in any order; `rest` holds flags passed on to Hydra."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    with_values = [("--config-dir", "-cd"), ("--config-name", "-cn"), ("--config-path", "-cp"), ("--cfg", "-c")]
    for names in [*with_values, ("--package", "-p"), ("--experimental-rerun",)]:
        parser.add_argument(*names)
    flags, rest = parser.parse_known_args(arguments)
    if flags.config_path or flags.experimental_rerun:
        parser.error("--config-path and --experimental-rerun are not supported. Try --config-dir, or resume=RUN.")
    # `experiment` is in the defaults list, but many are used to adding it.
    flags.overrides = [re.sub(r"^\+experiment=", "experiment=", text) for text in rest if not text.startswith("-")]
    given = {"--config-dir": flags.config_dir, "--config-name": flags.config_name, "--cfg": flags.cfg}
    given["--package"] = flags.package
    flags.rest = [text for text in rest if text.startswith("-")]
    flags.rest += [text for name, value in given.items() if value is not None for text in (name, value)]
    return flags


def _in_output_dir(config: Any) -> Any:
    """Use Hydra's output directory as run_dir, if the user or a sweep has set one."""
    context, run_dir = HydraConfig.get(), getattr(config, "run_dir", "")
    if context.mode is RunMode.MULTIRUN:
        output = Path(context.runtime.output_dir)
        config.run_dir = str(Path(run_dir) / output.name if run_dir else output)
        config.resume = None if config.trainer.dry_run else "auto"
    elif run_dir is None and Path(context.runtime.output_dir) != Path(context.runtime.cwd):
        config.run_dir = context.runtime.output_dir
    return config


# ---- directories of sweeps -------------------------------------------------------------------------------------


def sweep_settings(overrides: Sequence[str]) -> list[str]:
    """Name a sweep's folder after its fixed settings, and each run after its swept ones.

    Repeating the command then finds its runs. Settings that do not affect results are left out of the names.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:
        return []  # `find_mistakes` explains it
    own = [override for override in parsed if not override.is_hydra_override()]
    fixed = {override.key_or_group: override for override in own if not override.is_sweep_override()}
    settings = [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"]
    if not any(override.key_or_group == "hydra.sweep.dir" for override in parsed):
        settings.append(f"hydra.sweep.dir={quoted(str(Path('runs') / _folder_name(fixed)))}")
    return settings


NOT_IN_NAMES = re.compile(r"run_dir|resume|verify|trainer\.(device|threads|profile|dry_run|(log|save)_every.*)")


def _folder_name(fixed: dict[str, Override]) -> str:
    fixed = {key: override for key, override in fixed.items() if not NOT_IN_NAMES.fullmatch(key)}
    experiment, data = fixed.pop("experiment", None), fixed.pop("data", None)
    labels = [str(override.value()) for override in (experiment, data) if override is not None] or ["sweep"]
    labels += [f"{key.rpartition('.')[2]}-{override.value()}" for key, override in fixed.items()]
    return slug("-".join(labels))


def slug(text: str) -> str:
    """Make a directory name without shell metacharacters."""
    name = re.sub(r"[^\w.+]+", "-", text).strip("-") or "run"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class SweepFolder(Callback):
    """Hydra callback that remembers the sweep's folder."""

    noted: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepFolder.noted = Path(config.get("run_dir") or config.hydra.sweep.dir)


# ---- explaining mistakes ---------------------------------------------------------------------------------------


def compose_config(overrides: Sequence[str], *, name: str, schema: type[Schema]) -> Schema:
    """Compose a command line into a typed config, without running anything."""
    prepare_hydra()
    return make_config(_task_values(compose(parse_flags(overrides), name)), schema)


def compose(flags: argparse.Namespace, name: str) -> DictConfig:
    """Compose a command line with Hydra's public API, including Hydra's own node."""
    searchpath = [f"hydra.searchpath=['file://{Path(flags.config_dir).absolute()}']"] if flags.config_dir else []
    with _initialized(name):
        return hydra.compose(flags.config_name or name, [*searchpath, *flags.overrides], return_hydra_config=True)


def _initialized(name: str) -> Any:
    if (Path(CONF) / f"{name}.yaml").exists():
        return hydra.initialize_config_dir(CONF, version_base="1.3")
    return hydra.initialize(config_path=None, version_base="1.3")


def find_mistakes(flags: argparse.Namespace, name: str, schema: type[Any]) -> Iterator[str]:
    """Explain everything wrong with a command line's overrides, one line each."""
    if flags.config_dir and not Path(flags.config_dir).is_dir():
        yield f"--config-dir {flags.config_dir} is not a folder."
        return
    if spaced := re.search(r"([^\0=]+)\0=\0?([^\0]*)", "\0".join(flags.overrides)):
        yield f"Settings are key=value without spaces. Try {spaced[1]}={spaced[2] or 'VALUE'}."
        return
    choices, settings = [], []
    searchpath = [text for text in flags.overrides if text.startswith("hydra.searchpath=")]
    if flags.config_dir:
        searchpath.append(f"hydra.searchpath=['file://{Path(flags.config_dir).absolute()}']")
    with _initialized(name):
        loader = GlobalHydra.instance().config_loader()
        for text in flags.overrides:
            try:
                (override,) = OverridesParser.create(loader).parse_overrides([text])
                values = _samples(override, multirun=flags.multirun)
            except UserError as error:
                yield str(error)
                continue
            except HydraException:
                yield _not_understood(text)
                continue
            key = override.key_or_group
            options = loader.get_group_options(key, config_name=flags.config_name or name, overrides=searchpath)
            foreign = key in FOLDERS and key not in schema.__dataclass_fields__
            if options and not foreign and not isinstance(override.value(), dict):
                unknown = [value for value in values if value not in options]
                yield from (_unknown_option(key, value, options) for value in unknown)
                choices += [] if unknown else [f"{'+' if override.is_add() else ''}{key}={values[0]}"]
            elif override.is_hydra_override():
                choices += [] if override.is_sweep_override() else [text]
            elif values:
                settings.append((override, values[0]))
        choices += [text for text in searchpath if text not in choices]
        try:
            config = hydra.compose(flags.config_name or name, choices, return_hydra_config=True)
            chosen = config.hydra.runtime.choices
            defaults = _task_values(config)
        except HYDRA_ERRORS as error:
            yield one_paragraph(error)
            return
    yield from _setting_mistakes(settings, defaults, chosen, schema)


def _setting_mistakes(
    settings: Sequence[tuple[Override, Any]], values: dict[str, Any], chosen: Any, schema: type[Any]
) -> Iterator[str]:
    """Explain what is wrong with `key=value` overrides, given the config of the chosen options."""
    defaults = flatten(values)
    known = {*defaults, *(key.partition(".")[0] for key in defaults)}
    config = OmegaConf.create(values)
    for override, value in settings:
        key = override.key_or_group
        if key not in known:
            yield _unknown_setting(key, defaults if "." in key else known, chosen)
        elif override.is_delete():
            hint = f" Try {key}={typed(defaults[key])}." if key in defaults else ""
            yield f"~{key}: settings cannot be removed.{hint}"
        elif override.is_add():
            yield f"+{key}: the setting exists already. Try it without the plus sign."
        else:
            merges = isinstance(value, dict) and isinstance(OmegaConf.select(config, key), DictConfig)
            OmegaConf.update(config, key, value, merge=merges)
    yield from find_problems(OmegaConf.to_container(config), schema)


def _samples(override: Override, *, multirun: bool) -> list[Any]:
    """Return an override's value, or all values of a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if not multirun:
        raise UserError(f"{override.input_line}: several values need -m, which starts one run per value.")
    if not override.is_discrete_sweep():
        return []
    if values := list(override.sweep_iterator()):
        return values
    raise UserError(f"{override.input_line} matches nothing, so there is nothing to run.")


def _task_values(config: DictConfig) -> dict[str, Any]:
    """Return the command's own settings, without Hydra's."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return cast("dict[str, Any]", OmegaConf.to_container(own, resolve=True))


def _not_understood(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text} is not understood. Settings are key=value."
    return f'{text} is not understood. Quote the value twice: "{key}={quoted(value)}"'


def _unknown_setting(key: str, known: Any, chosen: Any) -> str:
    group, _, field = key.partition(".")
    owners = plugins_with(group, field) if group in FOLDERS else []
    if owners and group in chosen:
        return f"{key} is not a setting of {group}={chosen[group]}; it belongs to {group}={' or '.join(owners)}."
    return unknown_key(key, known)


def _unknown_option(group: str, option: Any, options: Sequence[str]) -> str:
    hint = close_to(str(option), options)
    suggestion = f"Did you mean {group}={hint}? " if hint else ""
    return f"{group}={typed(option)} does not exist. {suggestion}The options of {group} are: {', '.join(options)}."


def one_paragraph(error: BaseException) -> str:
    """Shorten an exception of Hydra, OmegaConf or the YAML parser to one paragraph."""
    text = re.split(r"\n\s*(?:object_type=|Config search path|Search path)", str(error) or str(error.__cause__))[0]
    text = " ".join(text.replace("full_key:", "in").split())
    if "lugin" in text:
        text += ". Is the plug-in installed? hydra/launcher=slurm needs pip install -c constraints.txt -e '.[slurm]'"
    return text


def _raised_by_hydra(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith("hydra.")
