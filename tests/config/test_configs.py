"""Every shipped config composes and states its command in its header."""

import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lm.cli import compose_config as compose
from lm.config.groups import FOLDERS, find_plugin, plugin_names
from lm.config.inference import EvaluateConfig, GenerateConfig
from lm.config.reference import document
from lm.config.schema import NgramConfig, PrepareConfig, TrainConfig, TrainerConfig
from lm.config.validate import default_values, flatten
from tests.conftest import ROOT, composed
from tests.helpers.settings_page import markdown

CONF = Path(__file__).resolve().parents[2] / "conf"
OPTIONS = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml") if path.parent.name != "commands")


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_each_option_header_has_a_valid_command(option: Path) -> None:
    header = [line for line in (CONF / option).read_text().splitlines() if line.startswith("#")]
    commands = [line.partition("python train.py ")[2] for line in header if "python train.py " in line]
    assert commands, f"{option} does not say its command"
    overrides = shlex.split(commands[0])
    assert f"{option.parent}={option.stem}" in overrides
    config = composed(*overrides)
    if option.parent.name in ("data", "input", "output", "optim"):
        assert option.stem.startswith(getattr(config, option.parent.name).name)


@pytest.mark.parametrize("experiment", sorted(CONF.glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_each_experiment_states_expected_results(experiment: Path) -> None:
    header = " ".join(line[2:] for line in experiment.read_text().splitlines() if line.startswith("#"))
    _, _, expected = header.partition("Expected: ")
    assert "perplexity" in header
    assert re.search(r"\b(time|seconds|minutes?|hours?|days)\b", expected) or "Ours: not run." in header


@pytest.mark.parametrize(
    ("name", "schema", "overrides"),
    [
        ("train", TrainConfig, []),
        ("prepare", PrepareConfig, []),
        ("ngram", NgramConfig, []),
        ("evaluate", EvaluateConfig, ["checkpoint=runs/NAME"]),
        ("generate", GenerateConfig, ["checkpoint=runs/NAME"]),
    ],
)
def test_each_command_composes_to_the_defaults_of_its_dataclass(name: str, schema: type, overrides: list[str]) -> None:
    values = asdict(compose(overrides, name=name, schema=schema))
    defaults = default_values(schema) | ({"checkpoint": "runs/NAME"} if overrides else {})
    assert {key: values[key] for key in defaults} == defaults


GROUPS = ("data", "input", "model", "output", "optim", "trainer")


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.parent.name in GROUPS], ids=str)
def test_no_option_repeats_or_contradicts_a_default(option: Path) -> None:
    """A plug-in's own option is empty; a variant contains only what differs from the option it extends."""
    group = str(option.parent)
    held = OmegaConf.to_container(OmegaConf.load(CONF / option)) or {}
    assert isinstance(held, dict)
    bases = held.pop("defaults", [])
    if group == "trainer":
        base = default_values(TrainerConfig)
    elif bases == [f"{option.stem}_schema"]:
        assert held == {}, "the option of a plug-in is its dataclass"
        return
    else:
        (extended,) = bases
        base = asdict(getattr(composed(f"{group}={extended}"), group))
    flat, before = flatten(held), flatten(base)
    assert [key for key, value in flat.items() if before[str(key)] == value] == []


@pytest.mark.parametrize("experiment", sorted(CONF.glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_no_experiment_repeats_a_default(experiment: Path) -> None:
    held = OmegaConf.to_container(OmegaConf.load(experiment))
    assert isinstance(held, dict)
    entries = held.pop("defaults")
    options = [f"experiment={entry}" for entry in entries if isinstance(entry, str) and entry != "_self_"]
    chosen = [item for entry in entries if isinstance(entry, dict) for item in entry.items()]
    options += [f"{key.removeprefix('override /')}={value}" for key, value in chosen]
    # A swept group has several options, so values for all of them may repeat the default of one.
    swept = held.pop("hydra", {}).get("sweeper", {}).get("params", {})
    held = {key: value for key, value in held.items() if key not in swept}
    before = flatten(asdict(composed(*options)))
    assert [key for key, value in flatten(held).items() if before[key] == value] == []


PAPER = {
    "optim.max_grad_norm": 1.0,
    "optim.lr": 0.1,
    "optim.embedding": "sparse",
    "trainer.max_epochs": 5,
    "trainer.bptt": 20,
}
RELEASED = {
    "optim.max_grad_norm": 0.25,
    "optim.embedding": "rowwise",
    "optim.schedule": "halve_after_half",
    "optim.weight_decay": 0.0,
    "trainer.max_epochs": 10,
    "trainer.batch_size": 128,
}
WIDE = {"model.embedding_size": 256, "model.hidden_size": 2048}


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        ("text8", PAPER | {"optim.weight_decay": 1e-6, "model.hidden_size": 512, "trainer.batch_size": 128}),
        ("europarl", PAPER | {"optim.weight_decay": 1e-6, "model.embedding_size": 256, "trainer.batch_size": 128}),
        ("europarl_finnish", PAPER | {"trainer.batch_size": 64, "data.language": "fi"}),
        ("text8", {"output.name": "adaptive"}),
        ("one_billion_word", PAPER | WIDE | {"optim.weight_decay": 0.0, "model.layers": 1}),
        ("one_billion_word_2_layers", PAPER | WIDE | {"model.layers": 2}),
        (
            "text8_released",
            RELEASED | {"output.cutoffs": [2000, 10000], "model.embedding_size": 512, "model.dropout": 0.25},
        ),
        (
            "one_billion_word_released",
            RELEASED | WIDE | {"output.cutoffs": [4000, 40000, 200000], "model.dropout": 0.01},
        ),
    ],
)
def test_presets_match_paper_and_released_code(experiment: str, expected: dict[str, object]) -> None:
    values = flatten(asdict(composed(f"experiment={experiment}")))
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize("experiment", sorted(CONF.glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_each_experiment_is_global(experiment: Path) -> None:
    """Without `_self_` in the defaults list, readers must know which of the two wins."""
    assert "_self_" in OmegaConf.load(experiment).defaults


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [None, *sorted(path.stem for path in CONF.glob("experiment/*.yaml"))])
def test_options_supply_what_an_experiment_omits(experiment: str | None) -> None:
    chosen = [f"experiment={experiment}"] if experiment else []
    default, other = (
        composed(*chosen),
        composed(*chosen, "trainer=gpu", "output=full", "input=table", "model.tie=false"),
    )
    assert other.output.name == "full"
    before, now = (asdict(config)["trainer"] for config in (default, other))
    differing = {key: (before[key], now[key]) for key in before if before[key] != now[key]}
    its_own = before["precision"] == "bf16"  # the fast recipes set it themselves
    assert differing == {"device": ("auto", "cuda"), **({} if its_own else {"precision": ("fp32", "bf16")})}


# ---- the page of settings --------------------------------------------------------------------------------------------


def test_settings_page_is_current() -> None:
    written = (ROOT / "docs/settings.md").read_text()
    assert written == f"{markdown()}\n", "run python -m tests.helpers.settings_page > docs/settings.md"


def test_every_setting_has_an_explanation() -> None:
    plugins = [find_plugin(group, name).settings for group in FOLDERS for name in plugin_names(group)]
    schemas = [TrainConfig, EvaluateConfig, GenerateConfig, NgramConfig, *plugins]
    assert [(schema.__name__, key) for schema in schemas for key, _, text in document(schema) if not text] == []
