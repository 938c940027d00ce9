"""The ranks of a run: torch.distributed under torchrun, or a single process.

    torchrun --nproc-per-node=8 train.py experiment=one_billion_word

Each rank plans the whole batch on its host, which is cheap, and computes its own streams. So all ranks have the same
rows, slice sizes and dropout masks, and exchange only gradients, hidden states and sums.

Decisions that depend on a clock or a signal must be the same on all ranks. They are exchanged between hosts in a
separate group, one step late, so that no device waits.
"""

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from lm.system.errors import UserError, in_words, is_shortage
from lm.system.interrupt import Stopped

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others in a collective operation on devices."""
RANK0_TIMEOUT = timedelta(days=2)
"""How long the others wait while rank 0 prepares a corpus or measures clusters."""

Value = TypeVar("Value")


class Ranks:
    """This process's rank, and collective operations, which are no-ops in a single process."""

    def __init__(self, rank: int = 0, size: int = 1, *, local_rank: int = 0) -> None:
        self.rank, self.size, self.local_rank, self.is_rank0 = rank, size, local_rank, rank == 0
        self._hosts: dist.ProcessGroup | None = None
        self._reports: Store | None = None
        self._pending: tuple[dist.Work, Tensor] | None = None

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Return the rank set by torchrun, before joining."""
        defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        values = {key: os.environ.get(key, default) for key, default in defaults.items()}
        if bad := [f"{key}={value!r}" for key, value in values.items() if not (value.isascii() and value.isdigit())]:
            raise UserError(f"{', '.join(bad)} must be a whole number. torchrun sets it. Unset it for one process.")
        rank, size, local_rank = map(int, values.values())
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 else ()
        missing = [key for key in needed if key not in os.environ]
        if missing or not 0 <= rank < size:
            without = f"WORLD_SIZE={size} is set without {', '.join(missing)}"
            what = without if missing else f"RANK must be below WORLD_SIZE; got {rank} and {size}"
            error = UserError(
                f"{what}. torchrun sets all of these variables. Try torchrun train.py ..., or unset them."
            )
            error.report_here = True  # the rank is unknown
            raise error
        if (tasks := os.environ.get("SLURM_NTASKS", "1")) != "1" and "WORLD_SIZE" not in os.environ:
            raise UserError(
                f"Slurm started {tasks} tasks without torchrun, and each would be a separate run. Try srun with "
                f"--ntasks-per-node=1 and torchrun --nproc-per-node={tasks} train.py ..., or env -u SLURM_NTASKS for "
                "one process."
            )
        return cls(rank, size, local_rank=local_rank)

    @contextmanager
    def joined(self, device: torch.device) -> Iterator[None]:
        """Join the other ranks inside the context. An error or a lost rank is reported once, in one paragraph."""
        self.join(device)
        try:
            yield
        except Stopped:
            self.leave()
            raise
        except (UserError, OSError) as error:
            if self.size == 1 or isinstance(error, BrokenPipeError):
                raise
            reported = UserError(in_words(error))
            reported.report_here = self._is_first_to_report(str(reported))
            raise reported from None
        except RuntimeError as error:
            if self.size == 1 or is_shortage(error) or not _is_loss(error):
                raise
            raise UserError(
                f"Rank {self.rank} has lost another of the {self.size} ranks: {str(error).splitlines()[0][:200]}. Its "
                "message is above, or on its node. resume=auto continues from the last checkpoint; torchrun "
                "--max-restarts=3 does so automatically."
            ) from error
        self.leave()

    def join(self, device: torch.device) -> None:
        """Join the process group; from here on only rank 0 writes to standard output."""
        if self.size == 1:
            return
        if not self.is_rank0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the process ends
        try:
            backend = "nccl" if device.type == "cuda" else "gloo"
            store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
            if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
                # On one node torchrun's restarts share a store, which still has the addresses of the lost ranks.
                store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            self._reports = PrefixStore("reports", store)
            dist.init_process_group(
                backend,
                store=PrefixStore("ranks", store),
                rank=rank,
                world_size=size,
                timeout=TIMEOUT,
                device_id=device if backend == "nccl" else None,
            )
            self._hosts = dist.new_group(backend="gloo", timeout=RANK0_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise UserError(
                f"The {self.size} ranks could not connect at {address}: {str(error).splitlines()[0]}. Another job may "
                "use that port, or a rank was not started. Try torchrun --standalone, or another --master-port."
            ) from None

    def leave(self) -> None:
        """Leave the process group. Collective; no communication may be pending."""
        if self.size == 1 or not dist.is_initialized():
            return
        # A group's threads end with its last reference, and DistributedDataParallel holds one in a reference cycle. A
        # thread that frees a tensor during interpreter shutdown would abort the process.
        self._hosts = self._pending = None
        dist.destroy_process_group()
        gc.collect()

    def _is_first_to_report(self, text: str) -> bool:
        """Whether no other rank has reported the same error."""
        if self._reports is None:
            return True
        try:
            return int(self._reports.add(hashlib.sha256(text.encode()).hexdigest(), 1)) == 1
        except RuntimeError:  # the store is gone
            return True

    def columns(self, num_streams: int, *, groups: int = 1) -> slice:
        """Return this rank's streams; at least one for each of `groups` micro-batches."""
        if num_streams % self.size:
            near = max(1, num_streams // self.size) * self.size
            fewer = next(ranks for ranks in range(self.size, 0, -1) if num_streams % ranks == 0)
            raise UserError(
                f"trainer.batch_size must be a multiple of the number of ranks ({self.size}); got {num_streams}. "
                f"Try trainer.batch_size={near}, or {fewer} rank(s) for a resumed run, whose batch size is fixed."
            )
        each = num_streams // self.size
        if groups > each:
            raise UserError(
                f"trainer.micro_batches must not exceed the streams of a rank ({num_streams} / {self.size} = {each}); "
                f"got {groups}. Try trainer.micro_batches={each}."
            )
        return slice(self.rank * each, (self.rank + 1) * each)

    # ---- on the hosts ----------------------------------------------------------------------------------

    def from_rank0(self, make: Callable[[], Value]) -> Value:
        """Call `make` on rank 0 and return its result on all ranks; a UserError is raised on all of them."""
        if self.size == 1:
            return make()
        result: list[Any] = [None, None]
        if self.is_rank0:
            try:
                result[0] = make()
            except UserError as error:
                result[1] = str(error)
        dist.broadcast_object_list(result, src=0, group=self._hosts)
        if result[1] is not None:
            raise UserError(result[1])
        return result[0]  # type: ignore[no-any-return]

    def rank0_first(self, make: Callable[[], Value]) -> Value:
        """Run `make` on rank 0, then on the others, which reuse its cached result."""
        made: list[Value] = []
        self.from_rank0(lambda: made.append(make()))
        return made[0] if made else make()

    def differing(self, settings: dict[str, Any]) -> list[str]:
        """Return the keys with values that differ between ranks."""
        if self.size == 1:
            return []
        all_settings: list[Any] = [None] * self.size
        dist.all_gather_object(all_settings, settings, group=self._hosts)
        keys = sorted({key for other in all_settings for key in other})
        return [key for key in keys if any(other.get(key) != settings.get(key) for other in all_settings)]

    def agree(self, *, stop: int, seconds: float) -> tuple[int, float]:
        """Return the highest signal of all ranks and rank 0's clock; with several ranks, from one step ago."""
        if self.size == 1:
            return stop, seconds
        before = self.last_agreement()
        mine = torch.tensor([float(stop), seconds if self.is_rank0 else -1.0], dtype=torch.float64)
        work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._hosts, async_op=True)
        assert work is not None
        self._pending = work, mine
        return before

    def last_agreement(self) -> tuple[int, float]:
        """Wait for the result of the last `agree`."""
        if self._pending is None:
            return 0, 0.0
        work, outcome = self._pending
        work.wait()
        self._pending = None
        stop, seconds = outcome.tolist()
        return int(stop), seconds

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.last_agreement()
        self.all_max(0)

    def all_max(self, value: int) -> int:
        """Return the maximum over ranks."""
        if self.size == 1:
            return value
        mine = torch.tensor([value])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._hosts)
        return int(mine)

    # ---- on the devices ------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """Average over ranks, in place."""
        return self.sum(tensor).div_(self.size) if self.size > 1 else tensor

    def gather_streams(self, part_1bD: Tensor) -> Tensor:
        """Gather the hidden states of all streams, (1, B, D)."""
        if self.size == 1:
            return part_1bD
        parts = [torch.empty_like(part_1bD) for _ in range(self.size)]
        dist.all_gather(parts, part_1bD.contiguous())
        return torch.cat(parts, dim=1)


def _is_loss(error: RuntimeError) -> bool:
    """Whether a torch backend reports the loss of another process."""
    return isinstance(error, dist.DistError) or any(name in str(error) for name in ("gloo", "NCCL", "onnection"))
