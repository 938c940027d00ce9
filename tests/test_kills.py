"""Commands killed at random times and repeated: the results have the same bits as those of an uninterrupted command.

python -m tests.test_kills 200 [SEED]    kill 200 commands and print what differs
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.system.tree import map_leaves
from lm.training.metrics import read_metrics
from tests.conftest import TINY, run_script, without_times
from tests.helpers.forks import TRAIN, Fork

STEPS = ["trainer.max_steps=400", "trainer.eval_every_steps=100", "trainer.save_every_steps=10"]
RUN = ["train.py", *TINY[3:-1], *STEPS, "run_dir=new/run", "resume=auto"]
SWEPT = ["train.py", "-m", *TINY[:-1], "trainer.max_steps=150", "trainer.save_every_steps=5", "run_dir=new/runs"]
TEXT = ["data=text", "data.dir=text", "data.root=new/data"]
COUNTS = ["lm/ngram/__main__.py", *TEXT[:2], "run_dir=new/run"]
EXPORT = ["lm/export/__main__.py", "checkpoint=run"]
COMMANDS = {
    "training": [
        [*RUN, *TINY[:3], "output=adaptive", "output.cutoffs=[5,15]", "optim.weight_decay=1e-5"],
        [*RUN, *TINY[:3], "output=sampled", "optim=adam", "optim.lr=0.01", "model.dropout=0.3", "trainer.average=0.9"],
        [
            *RUN,
            *TINY[:3],
            "output=hsm_freq",
            "model=irnn",
            "optim=sgd",
            "optim.lr=0.1",
            "trainer.micro_batches=2",
        ],
        [*RUN, "output=full", "data=text", "data.dir=text", "data.sequences=lines", "model=gru"],
    ],
    "preparation": [
        ["lm/prepare.py", *TEXT],
        ["lm/prepare.py", *TEXT, "data.tokenizer=sentencepiece", "data.vocab_size=275"],
        ["lm/prepare.py", "data=zipf", "data.vocab_size=3000", "data.tokens=300000", "data.root=new/data"],
    ],
    "counting": [
        [*COUNTS, "order=4", "out=new/model.arpa.gz", "data.root=new/data"],
        [*COUNTS, "features=skip5"],
        [*COUNTS, "arpa=counts.arpa", "prune=1e-6"],
    ],
    "sweeps": [[*SWEPT, "output=full,adaptive"], [*SWEPT, "seed=1,2", "optim=adam", "output=sampled"]],
    "export": [[*EXPORT, "out=new/model.onnx", "quantize=int8"], [*EXPORT, "out=new/model.pt2", "format=torch"]],
}
"""Commands whose results are in the folder new/; a repeated command continues or starts over."""
SHARES = {"training": 50, "preparation": 50, "counting": 40, "sweeps": 20, "export": 40}
"""Kills of each kind in 200."""
UNREPEATED = ("run.log", "run.json", "overrides.yaml", "events.out", "comparison.", "perplexity_by_")
"""Files with times: how their names begin."""


def run(words: list[str], *, seconds: float | None = None, draw: random.Random) -> tuple[int | None, str]:
    """Run a command, perhaps killing it after some seconds; return its exit code and messages."""
    child = Fork(start, *words, folder=Path.cwd())
    if seconds is not None:
        child.process.join(seconds)
        processes = [child.process.pid, *children(child.process.pid)]
        for victim in draw.choice([processes, processes[:1], processes[-1:]]):  # a sweep and its present run, or one
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        while any(Path(f"/proc/{process}").exists() for process in processes[1:]):
            time.sleep(0.01)
    return child.wait(300), child.err


def start(script: str, *words: str) -> None:
    sys.argv = [TRAIN if script == "train.py" else script, *words]
    run_script(script, list(words))


def children(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def results(folder: Path) -> dict[str, Any]:
    """Read what a command has written, without times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or path.name.startswith(UNREPEATED) or path.name.endswith(".lock"):
            continue
        if path.suffix == ".pt":
            found[name] = timeless(torch.load(path, weights_only=True))
        elif path.name == "metrics.jsonl":
            found[name] = [without_times(record) for record in read_metrics(path.parent)]
        elif path.name == "summary.json":
            found[name] = timeless(json.loads(path.read_text()))
        else:
            found[name] = path.read_bytes()
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        times = ("_seconds", "_at", "_per_s", "_gib", "_position", "source")  # of clusters: measured now, or earlier
        return {key: timeless(item) for key, item in value.items() if not str(key).endswith(times)}
    return map_leaves(lambda leaf: leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf, value)


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{place}/{key}")
    elif one != other:
        yield f"{place}: {str(one)[:80]} | {str(other)[:80]}"


def kill(kinds: dict[str, int], *, seed: int) -> Iterator[str]:
    """Kill commands in the working directory; yield what is wrong with their results."""
    draw = random.Random(seed)
    prepare_folder(draw)
    new, killed = Path("new"), Counter[str]()
    for kind, wanted in kinds.items():
        expected: dict[int, tuple[float, dict[str, Any]]] = {}
        while killed[kind] < wanted:
            number = draw.randrange(len(COMMANDS[kind]))
            words = COMMANDS[kind][number]
            if number not in expected:
                new.mkdir()
                began = time.monotonic()
                code, said = run(words, draw=draw)
                assert code == 0, (words, said)
                expected[number] = time.monotonic() - began, results(new)
                shutil.rmtree(new)
            new.mkdir()
            for _ in range(draw.randint(2, 6)):
                code, said = run(words, seconds=draw.uniform(0, expected[number][0]), draw=draw)
                killed[kind] += (code in (-signal.SIGKILL, 1) and kind == "sweeps") or code == -signal.SIGKILL
                if "Traceback" in said:
                    yield f"{words}: {said}"
            code, said = run(words, draw=draw)
            found = list(differences(expected[number][1], results(new)))
            if found or (code, "already holds a run" in said) not in ((0, False), (2, True)):
                yield f"{' '.join(words)}: exit code {code} {said}\n  " + "\n  ".join(found)
            shutil.rmtree(new)
    print(f"{sum(killed.values())} kills: {dict(killed)}", flush=True)


def prepare_folder(draw: random.Random) -> None:
    """Write a text, a trained run and a count model to the working directory."""
    Path("text").mkdir()
    for split, number in {"train": 20_000, "valid": 500, "test": 500}.items():
        lines = (" ".join(f"w{draw.randrange(2000) // draw.randint(1, 50)}" for _ in range(9)) for _ in range(number))
        Path(f"text/{split}.txt").write_text("".join(f"{line}\n" for line in lines))
    for words in (["train.py", *TINY, "run_dir=run"], [*COUNTS[:-1], "order=3", "run_dir=n", "out=counts.arpa"]):
        assert run(words, draw=draw)[0] == 0


@pytest.mark.slow
def test_killed_commands_repeat_their_results(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    assert list(kill({kind: share // 10 for kind, share in SHARES.items()}, seed=0)) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        number, given = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
        for text in kill({kind: share * number // 200 for kind, share in SHARES.items()}, seed=given):
            print(text, flush=True)
