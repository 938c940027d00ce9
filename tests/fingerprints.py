"""Hashes of what small runs compute, to the last bit: equal before and after a change that must change nothing.

    python -m tests.fingerprints > before        # on one commit
    python -m tests.fingerprints > after         # on another, on the same machine
    diff before after

Every output layer, every form of the word table, dropout, decay, micro-batches, bfloat16 and two ranks.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

ROOT = Path(__file__).resolve().parent.parent
TIMES = ("time", "train_seconds", "eval_seconds", "speed/", "memory/")
COMMON = """
    data=zipf data.vocab_size=60 data.tokens=3000 model=small model.embedding_size=8 model.hidden_size=16
    model.dropout=0.2 trainer.batch_size=8 trainer.bptt=5 trainer.max_epochs=null trainer.max_steps=60
    trainer.eval_every_steps=25 trainer.log_every_steps=7 trainer.threads=1 evaluate.streams=3 optim.weight_decay=1e-4
""".split()  # noqa: SIM905
LAYERS = {
    "full": "output=full",
    "sampled": "output=sampled",
    "hsm_freq": "output=hsm_freq",
    "hsm_sim": "output=hsm_sim",
    "dsoftmax": "output=dsoftmax output.cutoffs=[10,30]",
    "dsoftmax_star": "output=dsoftmax_star output.cutoffs=[10,30]",
    "adaptive": "output=adaptive output.cutoffs=[10,30]",
}
RUNS = {
    **LAYERS,
    "rowwise": "output=full {embedding}=rowwise",
    "dense": "output=full {embedding}=dense",
    "projected": "output=full model.layers=2 model.projection=8",
    "micro-batches": "output=sampled {micro_batches}=3",
    "bf16": "output=adaptive output.cutoffs=[10,30] trainer.precision=bf16",
}
RANKS = {f"{name}, 2 ranks": text for name, text in LAYERS.items()}
KEYS = {"embedding": "optim.embedding_update", "micro_batches": "trainer.micro_batches"}
"""Settings whose names may change."""


def main() -> None:
    with TemporaryDirectory() as folder:
        for name, text in {**RUNS, **RANKS}.items():
            run = Path(folder) / name.replace(" ", "-").replace(",", "")
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if "ranks" in name else []
            settings = [*COMMON, *text.format(**KEYS).split(), f"run_dir={run}", "data.root=data"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, *launch, str(ROOT / "train.py"), *settings]
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
            print(f"{name:22} figures {figures(run)}  state {state(run)}", flush=True)


def figures(run: Path) -> str:
    """Of everything that was logged, but for times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in r.items() if not key.startswith(TIMES)} for r in records]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def state(run: Path) -> str:
    """Of all tensors in the last checkpoint but the vocabulary's: weights, optimizer, carried state."""
    content = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    digest = hashlib.sha256()
    for tensor in tensors({key: value for key, value in content.items() if key != "vocabulary"}):
        digest.update(tensor.double().contiguous().numpy().tobytes())  # by value, whatever type holds it
    return digest.hexdigest()[:16]


def tensors(tree: object) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


if __name__ == "__main__":
    main()
