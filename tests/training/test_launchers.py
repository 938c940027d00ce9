"""Sweeps by Hydra's submitit launcher: local processes, and the commands that Slurm would get."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, Command

SBATCH = """#!/bin/sh
file=$1
cp "$file" submitted.sh
for task in 0 1; do
    export SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 \\
        SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=localhost
    sh "$file" >job-$task.txt 2>&1 </dev/null &
done
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/sh
shift 5
exec "$@"
"""
"""Strip the launcher's own options: --unbuffered, --output FILE, --error FILE."""
SACCT = "#!/bin/sh\necho 'JobID|State|NodeList|'\n"


def sweep(folder: Path, *overrides: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "train.py"), "-m", *overrides]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=variables, timeout=240)


def test_missing_plugin_raises(command: Command, workspace: Path) -> None:
    missing = ["hydra/launcher=slurm", "hydra.launcher._target_=hydra_plugins.nowhere.Launcher"]
    done = command("train.py", "-m", *TINY, "seed=1,2", *missing, check=2)
    assert "pip install" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(workspace.rglob("config.yaml"))


@pytest.mark.slow
def test_concurrent_two_rank_runs(workspace: Path) -> None:
    pytest.importorskip("submitit")
    settings = [*(s for s in TINY if s != "output=full"), "output.cutoffs=[9],[999]", "run_dir='my runs'"]
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]
    done = sweep(workspace, *settings, *launcher)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "output.cutoffs must increase" in done.stderr
    (row,) = json.loads((workspace / "my runs/comparison/comparison.json").read_text())
    assert row["finished"]
    first, second = (
        "".join(path.read_text() for path in workspace.glob(f"runs/*/.submitit/*/*_{rank}_log.out")) for rank in (0, 1)
    )
    assert "Test perplexity" in first
    assert "perplexity" not in second, "only rank 0 prints"
    (start,) = json.loads((workspace / "my runs/output.cutoffs-9/run.json").read_text())["starts"]
    assert start["ranks"] == 2

    before = [path.stat().st_mtime_ns for path in workspace.glob("my runs/*/summary.json")]
    sweep(workspace, *settings, *launcher)
    assert [path.stat().st_mtime_ns for path in workspace.glob("my runs/*/summary.json")] == before, "skipped"


@pytest.mark.slow
def test_slurm_without_torchrun_is_single_process(workspace: Path) -> None:
    """The plug-in's real Slurm code; only the cluster's commands are faked."""
    pytest.importorskip("submitit")
    commands = workspace / "bin"
    commands.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    settings = [*TINY, "seed=1,2", "run_dir=swept", "hydra/launcher=slurm", "hydra.launcher.partition=gpu"]
    done = sweep(workspace, *settings, PATH=f"{commands}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    submitted = (workspace / "submitted.sh").read_text()
    for option in ("partition=gpu", "gpus-per-node=1", "array=0-1%2", "time=1440", "ntasks-per-node=1"):
        assert f"#SBATCH --{option}\n" in submitted
    (row,) = json.loads((workspace / "swept/comparison/comparison.json").read_text())
    assert row["runs"] == 2
    assert row["finished"]
