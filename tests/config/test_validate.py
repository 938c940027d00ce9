"""Validation: conversions, rules, and messages that name key, value, rule and fix."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import pytest

from lm.config.groups import Range, Resumable
from lm.config.schema import TrainConfig
from lm.config.validate import close_to, find_problems, flatten, make_config, may_change, unknown_key
from lm.system.errors import UserError


@dataclass
class Inner:
    rate: Annotated[float | None, Range(above=0, below=1)]
    kind: Literal["stream", "token"]
    names: list[str]


@dataclass
class Outer:
    inner: Inner
    flag: bool
    path: str | None
    count: Annotated[int, Range(least=1), Resumable] = 3


SOUND = {"inner": {"rate": 0.5, "kind": "token", "names": ["a"]}, "count": 3, "flag": True, "path": None}


def with_value(key: str, value: object) -> dict[str, object]:
    *groups, last = key.split(".")
    values: dict[str, object] = {**SOUND, "inner": dict(SOUND["inner"])}  # type: ignore[call-overload]
    place = values
    for group in groups:
        place = place[group]  # type: ignore[assignment]
    place[last] = value
    return values


def test_valid_values_round_trip() -> None:
    config = make_config(SOUND, Outer)
    assert config == Outer(Inner(0.5, "token", ["a"]), True, None, 3)
    assert asdict(config) == SOUND
    assert make_config(with_value("inner.rate", None), Outer).inner.rate is None
    assert make_config(with_value("path", 2017), Outer).path == "2017"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", 0, "count must be a whole number, at least 1; got 0. Try count=3."),
        ("count", 2.5, "count must be a whole number, at least 1; got 2.5. Try count=3."),
        ("count", "three", "count must be a whole number, at least 1; got 'three'. Try count=3."),
        ("count", True, "count must be a whole number, at least 1; got True. Try count=3."),
        ("count", None, "count must be a whole number, at least 1; got None. Try count=3."),
        ("flag", 1, "flag must be true or false; got 1."),
        ("inner.rate", 1.0, "inner.rate must be a number, above 0 and below 1 or null; got 1.0."),
        ("inner.rate", float("inf"), "inner.rate must be a number, above 0 and below 1 or null; got inf."),
        ("inner.rate", float("nan"), "inner.rate must be a number, above 0 and below 1 or null; got nan."),
        ("inner.kind", "wavy", "inner.kind must be one of stream, token; got 'wavy'."),
        ("inner.names", "a", "inner.names must be a list, as in [a,b]; got 'a'. Lists need brackets: inner.names=[a]."),
        ("inner.names", None, "inner.names must be a list, as in [a,b]; got None."),
        ("inner", 3, "inner must be a group of settings; got 3."),
        ("path", ["x"], "path must be text or null; got ['x']."),
    ],
)
def test_invalid_values_are_named(key: str, value: object, message: str) -> None:
    assert list(find_problems(with_value(key, value), Outer)) == [message]


def test_all_mistakes_are_reported_together() -> None:
    values = {**with_value("count", -1), "flag": "maybe", "cuont": 1}
    del values["path"]
    with pytest.raises(UserError) as error:
        make_config(values, Outer)
    assert len(str(error.value).splitlines()) == 4
    problems = list(find_problems(values, Outer))
    assert "count must be a whole number, at least 1; got -1. Try count=3." in problems
    assert "path is missing; it must be text or null." in problems


def test_unknown_key_suggests_nearest() -> None:
    known = ["optim.lr", "optim.max_grad_norm", "seed", "trainer.max_epochs"]
    assert unknown_key("optim.lrr", known) == "optim.lrr is not a setting. Did you mean optim.lr?"
    assert unknown_key("lr", known) == "lr is not a setting. Did you mean optim.lr?"
    assert unknown_key("optim.max_epoch", known).endswith("Did you mean trainer.max_epochs?")
    assert unknown_key("trainr.max_epochs", known).endswith("Did you mean trainer.max_epochs?")
    beside = unknown_key("trainer.waiting", ["trainer.device", "trainer.patience", "trainer.threads"])
    assert "Did you mean" not in beside, "a shared group does not make keys similar"
    assert beside.endswith("The keys there are: trainer.device, trainer.patience, trainer.threads.")
    assert (
        unknown_key("optim.zzzz", known)
        == "optim.zzzz is not a setting. The keys there are: optim.lr, optim.max_grad_norm."
    )
    assert close_to("zzzz", known) is None


def test_resumable_keys_are_limits_logging_and_device() -> None:
    assert list(may_change(Outer)) == ["count"]
    free = set(may_change(TrainConfig))
    assert {"trainer.max_epochs", "trainer.device", "trainer.log_every_steps", "run_dir", "resume"} <= free
    assert not {"seed", "optim.lr", "trainer.batch_size", "evaluate.streams", "trainer.eval_every_steps"} & free


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {"a.b": 1, "a.c.d": [2], "e": None}
