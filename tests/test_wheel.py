"""The wheel in a clean environment, away from the repository: `make wheel-check`."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import lm
from tests.conftest import ROOT, TINY


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel; the build leaves no files in the repository."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().splitlines():
        if (ROOT / name).exists() and name.split("/")[0] in {"lm", "conf", "pyproject.toml", "setup.py", "README.md"}:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(source), folder=built)
    (found,) = built.glob(f"adaptive_lm-{lm.__version__}-*.whl")
    return found


def run(*command: str, folder: Path, code: int = 0) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_has_the_package_and_the_configs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT) for path in [*(ROOT / "lm").rglob("*.py"), ROOT / "lm/py.typed"]}
    expected |= {Path("lm") / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}
    assert {str(path) for path in expected} <= names
    assert {name.split("/")[0] for name in names} == {"lm", f"adaptive_lm-{lm.__version__}.dist-info"}


@pytest.mark.slow
def test_commands_of_the_wheel_work_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    folder, binaries = tmp_path / "empty", tmp_path / "venv/bin"
    folder.mkdir()
    pip, program = str(binaries / "pip"), str(binaries / "adaptive-lm")
    run(pip, "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel), folder=folder)
    assert "No broken requirements" in run(pip, "check", folder=folder)
    assert run(program, "--version", folder=folder) == f"adaptive-lm {lm.__version__}\n"
    assert "adaptive-lm prepare " in run(program, folder=folder)
    assert "The commands are: train, evaluate," in run(program, "tran", folder=folder, code=2)
    assert "adaptive-lm train resume=auto " in run(program, "train", "--help", folder=folder)
    said = run(program, "train", *TINY, "run_dir=runs/one", folder=folder)
    assert "  adaptive-lm evaluate checkpoint=runs/one\n" in said
    assert "Did you mean" in run(program, "train", "modl=lstm", folder=folder, code=2)
    assert "perplexity" in run(program, "evaluate", "checkpoint=runs/one", folder=folder)
    run(program, "generate", "checkpoint=runs/one", "max_words=3", folder=folder)
    assert "Try pip install" in run(program, "export", "checkpoint=runs/one", "out=x.onnx", folder=folder, code=2)
    run(program, "prepare", "data=pydoc", folder=folder)
    run(program, "ngram", *(word for word in TINY if word.startswith("data")), "run_dir=runs/two", folder=folder)
    assert "The table is in runs/comparison" in run(program, "compare", "runs", folder=folder)
    swept = run(program, "train", "-m", *TINY, "seed=1,2", "run_dir=runs/sweep", folder=folder)
    assert "run 2 of 2" in swept and (folder / "runs/sweep/seed-2/summary.json").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["data", "runs"]
    layer = "import lm; print(lm.AdaptiveSoftmax(16, 40, [10, 25]).vocab_size, lm.__file__)"
    assert run(str(binaries / "python"), "-c", layer, folder=folder).startswith(f"40 {tmp_path}/venv/lib")


# ---- make ------------------------------------------------------------------------------------------------------------


def planned(folder: Path, target: str) -> str:
    """Return a target's commands without running them."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_installs_only_what_it_needs(tmp_path: Path) -> None:
    commands = planned(tmp_path, "train")
    assert "-e '.[plots]'" in commands and "dev" not in commands.replace("/dev/", "")
    assert commands.index("-e '.[plots]'") < commands.index("train.py")


@pytest.mark.parametrize("target", ["test", "lint", "setup"])
def test_make_installs_dev_tools(tmp_path: Path, target: str) -> None:
    assert "-e '.[plots,dev]'" in planned(tmp_path, target)


def test_full_environment_suffices_for_training(tmp_path: Path) -> None:
    planned(tmp_path, "train")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed").touch()
    again = subprocess.run(["make", "-n", "train"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip install" not in again.stdout
