"""The Docker files, tested without Docker: they name existing files, and their steps work in a clean environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY
from tests.helpers.docker import build_arguments, context, instructions, services
from tests.helpers.pages import commands

STRANGER = 54321
"""A user id without an account, as with `docker run -u`."""


@dataclass
class Image:
    """The image built from the Dockerfile's instructions, in a folder that acts as its root."""

    root: Path
    environment: dict[str, str]
    workdir: Path = Path()
    entrypoint: list[str] = field(default_factory=list)

    def build(self) -> None:
        (self.root / "tmp").mkdir()
        (self.root / "tmp").chmod(0o1777)
        for keyword, rest in instructions():
            rest = re.sub(r"(?<![\w.])/(?=(app|opt|tmp)\b)", f"{self.root}/", rest)
            match keyword:
                case "RUN":
                    self.run(["sh", "-ec", rest])
                case "ENV":
                    for setting in rest.split():
                        name, _, value = setting.replace("${COMMIT}", "abc").partition("=")
                        self.environment[name] = value.replace("$PATH", self.environment["PATH"])
                case "WORKDIR":
                    self.workdir = Path(rest)
                    self.workdir.mkdir(parents=True)
                case "COPY":
                    self._copy(rest.split()[:-1])
                case "ENTRYPOINT":
                    self.entrypoint = json.loads(rest)

    def _copy(self, sources: list[str]) -> None:
        files = [path for path in context() if sources == ["."] or any(fnmatch(str(path), s) for s in sources)]
        for path in files:
            (self.workdir / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, self.workdir / path)

    def run(self, command: list[str], **options: int) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            command, cwd=self.workdir, env=self.environment, capture_output=True, text=True, **options
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def run_as_a_stranger(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run the default command as a user who can only write to data/, runs/ and /tmp."""
        for path in self.workdir.rglob("*"):
            if not {"data", "runs", "cache"} & set(path.relative_to(self.workdir).parts):
                path.chmod(0o555 if path.is_dir() else 0o444)
        self.workdir.chmod(0o555)
        # Only root can switch users; for other users, the source is at least read-only.
        stranger = {"user": STRANGER, "group": STRANGER} if os.getuid() == 0 else {}
        program, *rest = self.entrypoint
        found = shutil.which(program, path=self.environment["PATH"])
        assert found is not None
        return self.run([found, *rest, *arguments], **stranger)


@pytest.fixture
def image() -> Iterator[Image]:
    """An empty image with a Python like the base image's, readable by any user."""
    for prefix in ("/usr", sys.base_prefix):
        probe = "import pip, sys, venv; sys.exit(sys.version_info < (3, 11))"
        if not subprocess.run([f"{prefix}/bin/python3", "-c", probe], capture_output=True).returncode:
            break
    else:
        pytest.skip("needs a Python with pip outside of any virtual environment")
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        Path(folder).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        yield Image(Path(folder), {"PATH": f"{prefix}/bin:/usr/bin:/bin", **kept})


@pytest.mark.slow
def test_image_steps_train_from_scratch(image: Image) -> None:
    """The base image's torch is kept; where this environment's cannot stand for it, it is installed."""
    lent = lend_torch(image)
    image.build()
    installed = {path.name for path in image.root.glob("opt/venv/lib/python*/site-packages/*")}
    assert {"hydra", "numba", "tensorboard", "matplotlib"} <= installed
    assert lent != ("torch" in installed)
    done = image.run_as_a_stranger(*TINY, "output=adaptive", "trainer.max_steps=3", "run_dir=runs/x")
    assert "Everything is in runs/x" in done.stdout
    assert (image.workdir / "runs/x/checkpoints/last.pt").exists()
    assert list((image.workdir / "data/cost-models").iterdir())
    assert json.loads((image.workdir / "runs/x/run.json").read_text())["starts"][0]["commit"] == "abc"
    assert list((image.workdir / "cache").iterdir()), "compiled functions are cached there"


def lend_torch(image: Image) -> bool:
    """Make this environment's torch available to the image's Python, if versions match."""
    version = image.run(["python3", "-c", "import sys; print(*sys.version_info[:2])"]).stdout.split()
    torch = distribution("torch")
    if [int(part) for part in version] != list(sys.version_info[:2]) or torch.files is None:
        return False
    base = image.root / "base"
    base.mkdir()
    for name in {path.parts[0] for path in torch.files if path.parts[0] not in ("..", "__pycache__")}:
        (base / name).symlink_to(Path(str(torch.locate_file(name))))
    image.environment["PYTHONPATH"] = str(base)
    return True


TORCH_AND_ITS_NEEDS = (
    "torch torchgen functorch typing_extensions.py sympy mpmath networkx jinja2 markupsafe fsspec filelock"
)


@pytest.mark.slow
def test_torchrun_of_the_base_image_trains_with_the_images_own_python(tmp_path: Path) -> None:
    """The base image's Python knows torch but not hydra, and torchrun's first line names it."""
    base, python = tmp_path / "base", f"{sys.base_prefix}/bin/python3"
    base.mkdir()
    packages = Path(str(distribution("torch").locate_file("")))
    for name in TORCH_AND_ITS_NEEDS.split():
        if (packages / name).exists():
            (base / name).symlink_to(packages / name)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
    torchrun.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(base), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHON_EXEC", None)
    knows_hydra = subprocess.run([python, "-c", "import hydra"], env=environment, capture_output=True).returncode == 0
    if knows_hydra or subprocess.run([python, "-c", "import torch"], env=environment, capture_output=True).returncode:
        pytest.skip("no Python here that knows torch and not hydra")
    assert ("ENV", "PATH=/opt/venv/bin:$PATH PYTHON_EXEC=/opt/venv/bin/python") in instructions()
    command = [
        str(torchrun),
        "--standalone",
        "--nproc-per-node=2",
        str(ROOT / "train.py"),
        *TINY,
        "trainer.max_steps=3",
    ]
    for more, code in (({"PYTHON_EXEC": sys.executable}, 0), ({}, 1)):
        options = {"cwd": tmp_path, "env": environment | more, "capture_output": True, "text": True, "timeout": 200}
        done = subprocess.run([*command, f"run_dir=run-{code}"], **options)  # type: ignore[call-overload]
        assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "run-0/checkpoints/last.pt").exists()


def test_base_image_matches_pinned_torch() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    version = next(pin for pin in pins if pin.startswith("torch==")).removeprefix("torch==")
    tag = rf"pytorch/pytorch:{re.escape(version)}-cuda[\d.]+-cudnn9-runtime"
    assert re.fullmatch(tag, build_arguments()["BASE_IMAGE"])


def test_image_has_no_data_and_no_runs() -> None:
    tops = {path.parts[0] for path in context()}
    assert tops == {"benchmarks", "conf", "constraints.txt", "evaluate.py", "lm", "pyproject.toml", "train.py"}


def test_compose_names_what_is_there() -> None:
    workdir = dict(instructions())["WORKDIR"]
    for service in services().values():
        assert set(service["build"]["args"]) == set(build_arguments())
        for volume in service["volumes"]:
            assert volume["target"] == f"{workdir}/{Path(volume['source']).name}"
            assert Path(volume["source"]).name in ("data", "runs", "cache")


def test_readme_sets_compose_variables() -> None:
    asked = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text()))
    kept = [line for line in commands(ROOT / "README.md") if "> .env" in line]
    assert set(re.findall(r"(\w+)=", " ".join(kept))) == asked - {"PIP_CONF"} == {"RUN_AS"}


def test_only_training_requests_gpus_and_tensorboard_is_local() -> None:
    train, board = services()["train"], services()["tensorboard"]
    devices = [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert train["deploy"]["resources"]["reservations"]["devices"] == devices
    assert "deploy" not in board
    host, outside, inside = board["ports"][0].split(":")
    assert host == "127.0.0.1"
    assert outside == inside == board["command"][board["command"].index("--port") + 1]


def test_compose_accepts_its_file() -> None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    for settings, code in [({"RUN_AS": "1:2"}, 0), ({}, 1)]:
        done = subprocess.run(
            ["docker", "compose", "config", "--quiet"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": "/tmp", **settings},
        )
        assert bool(done.returncode) == bool(code), done.stderr
