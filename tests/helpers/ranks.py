"""Real ranks in a real process group, started without torchrun."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from lm.config.schema import TrainConfig
from lm.data.corpus import open_corpus
from lm.system.ranks import Ranks
from tests.helpers.forks import TRAIN, Fork, train
from tests.helpers.training import losses_of, make_trainer

__all__ = ["TRAIN", "TWO_GPUS", "Ended", "Group", "losses_alone", "run_ranks", "train", "train_all"]

TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
"""For NCCL versions of the Gloo tests."""


@dataclass(frozen=True)
class Ended:
    """Exit codes and output of a group of ranks."""

    codes: list[int | None]
    out: str
    err: str


class Group:
    """Ranks that call a function; only their environments differ."""

    def __init__(self, target: Callable[..., Any], *arguments: Any, ranks: int, folder: Path, **variables: str) -> None:
        # As with torchrun, the launcher hosts the rendezvous store, on any free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **variables,
        }
        self._forks = [
            Fork(target, *arguments, folder=folder, name=f"rank-{i}", **common, RANK=str(i), LOCAL_RANK=str(i))
            for i in range(ranks)
        ]
        self.processes = [fork.process for fork in self._forks]

    def ended(self, *, within: float = 120) -> Ended:
        """Wait for all ranks; fail if one does not end."""
        codes = [fork.wait(within) for fork in self._forks]
        out, err = ("".join(getattr(fork, kind) for fork in self._forks) for kind in ("out", "err"))
        late = [rank for rank, code in enumerate(codes) if code is None]
        assert not late, f"ranks {late} do not end:\n{out}\n{err}"
        return Ended(codes, out, err)


def run_ranks(target: Callable[..., Any], *arguments: Any, ranks: int, folder: Path) -> Ended:
    """Call an importable function on several ranks in a folder, and wait."""
    return Group(target, *arguments, ranks=ranks, folder=folder).ended()


def train_all(configs: list[TrainConfig], steps: int, device_type: str = "cpu") -> None:
    """Train each of the settings on a rank; write the losses to losses.json and check that all ranks' weights agree."""
    torch.set_num_threads(1)
    ranks = Ranks.from_environment()
    device = torch.device(device_type, ranks.rank) if device_type == "cuda" else torch.device("cpu")
    losses = []
    with ranks.joined(device):
        for config in configs:
            corpus = open_corpus(config.data)
            trainer, batches = make_trainer(config, corpus, device=str(device), num_batches=steps, ranks=ranks)
            losses.append(losses_of(trainer, batches))
            weights = b"".join(p.detach().cpu().numpy().tobytes() for p in trainer.model.parameters())
            assert ranks.differing({"weights": hashlib.sha256(weights).hexdigest()}) == [], config
    if ranks.is_rank0:
        Path("losses.json").write_text(json.dumps(losses))


def losses_alone(config: TrainConfig, steps: int, device_type: str = "cpu") -> list[float]:
    """Return the losses of the same steps in one process."""
    return losses_of(*make_trainer(config, open_corpus(config.data), device=device_type, num_batches=steps))
