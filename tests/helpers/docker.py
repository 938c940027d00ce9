"""Parse the Docker files without Docker: instructions, build context, services, documented commands."""

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lm.config.inference import EvaluateConfig
from lm.config.schema import TrainConfig
from tests.conftest import ROOT
from tests.helpers.pages import check_line

SCHEMAS = {"train.py": TrainConfig, "evaluate.py": EvaluateConfig}


def instructions() -> list[tuple[str, str]]:
    """Return (keyword, arguments) of each Dockerfile instruction, with comments stripped and lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", "")
    text = re.sub(r"^RUN --mount=type=secret,\S+", "RUN", text, flags=re.M)  # optional: nothing is there
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def build_arguments() -> dict[str, str]:
    """Return the Dockerfile's build arguments and their defaults."""
    return dict(rest.partition("=")[::2] for keyword, rest in instructions() if keyword == "ARG")


def context() -> Iterator[Path]:
    """Yield the files that .dockerignore lets into the image, relative to the project."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    kept = [line[1:] for line in lines if line[0] == "!"]
    assert [line for line in lines if line[0] != "!"] == ["*", "**/__pycache__"]
    assert all((ROOT / name).exists() for name in kept)
    for name in kept:
        for path in [ROOT / name, *(ROOT / name).rglob("*")]:
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)


def services() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def check_command(words: Sequence[str]) -> None:
    """Assert that a `docker ...` command names only existing services, arguments, images, folders and settings."""
    match words:
        case ["docker", "compose", "build", *options]:
            _check_build(options)
        case ["docker", "compose", "run", "--rm", "--entrypoint", "python", "train", "-m", module, "--out", file]:
            assert find_spec(module) and file.startswith("runs/")
        case ["docker", "compose", "up", "-d", service]:
            assert service in services()
        case ["docker", "compose", "run", "--rm", "--entrypoint", "python", service, script, *settings]:
            assert service in services()
            check_line(settings, name=Path(script).stem, schema=SCHEMAS[script])
        case ["docker", "compose", "run", "--rm", "--entrypoint", "torchrun", service, _, script, *settings]:
            assert service in services()
            check_line(settings, name=Path(script).stem, schema=SCHEMAS[script])
        case ["docker", "compose", "run", "--rm", service, *settings]:
            assert "entrypoint" not in services()[service]
            check_line(settings, name="train", schema=TrainConfig)
        case ["docker", "build", "-t", image, *options, "."]:
            assert image == services()["train"]["image"]
            _check_build(options)
        case ["docker", "run", "--rm", "--init", "-u", _, "-v", data, "-v", runs, image, *settings]:
            targets = [mount["target"] for mount in services()["train"]["volumes"] if mount["type"] == "bind"]
            assert [mount.partition(":")[2] for mount in (data, runs)] == targets
            assert image == services()["train"]["image"]
            check_line(settings, name="train", schema=TrainConfig)
        case _:
            raise AssertionError(f"{' '.join(words)} is of no form that is known here")


def _check_build(options: Sequence[str]) -> None:
    for flag, value in zip(options[::2], options[1::2], strict=True):
        assert flag == "--build-arg"
        assert value.partition("=")[0] in build_arguments()
