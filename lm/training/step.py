"""The forward and backward pass of a step. `Trainer.step` does the update.

Gradient accumulation: `trainer.micro_batches` splits a batch's streams into groups and sums their gradients. The sum
equals the gradient of the whole batch: dropout masks are drawn for all streams, samples are shared, and each group is
weighted by its tokens. Only one group's activations exist at a time.

With several ranks DistributedDataParallel averages the gradients during the backward pass. It does not wrap the input:
`lm.optim.optimizer` averages the input's gradients, those of a word table as rows.

Shapes: T steps, B streams, b streams in a group, E embedding width, D hidden width.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lm.data.batches import Batch
from lm.model.base import State, detach, join_streams, select_streams
from lm.model.language_model import LanguageModel
from lm.model.regularization import DropoutMasks
from lm.output.base import Plan
from lm.system.devices import Precision, autocast, matmul_precision
from lm.system.ranks import Ranks


def _compressed(group: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """torch's hook; by name, DistributedDataParallel rejects it on Gloo, which supports bfloat16 too."""
    return bf16_compress_hook(group, bucket)  # type: ignore[arg-type]


class CoreWithLoss(nn.Module):
    """Core and output layer as one module for DistributedDataParallel."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.core, self.output = model.core, model.output
        self._loss = model.loss

    def forward(
        self, embedded_TbE: Tensor, targets_Tb: Tensor, plan: Plan, state: State, masks: DropoutMasks
    ) -> tuple[list[Tensor], State]:
        return self._loss(embedded_TbE, targets_Tb, state, plan=plan, masks=masks)


class ForwardBackward:
    """Forward and backward pass of a batch; accumulates gradients in the parameters."""

    def __init__(
        self, model: LanguageModel, *, precision: Precision, ranks: Ranks | None = None, compress: bool = False
    ) -> None:
        """`compress` exchanges the gradients of core and output layer in bfloat16."""
        self.model, self.precision, self.num_ranks = model, precision, ranks.size if ranks is not None else 1
        self.core_with_loss: nn.Module = CoreWithLoss(model)
        if ranks is not None and ranks.size > 1:
            self.core_with_loss = exchanged = DistributedDataParallel(
                self.core_with_loss, forward_sync_buffers=False, gradient_as_bucket_view=True
            )
            if compress:
                exchanged.register_comm_hook(None, _compressed)

    def __call__(self, batch: Batch, state: State, masks: DropoutMasks) -> tuple[Tensor, State]:
        """Return the loss of this rank's streams and any penalty, (1,) or (2,), and their next state; all detached."""
        with matmul_precision(self.precision):
            with autocast(self.precision, batch.device):
                embedded_TBE = self.model.embed(batch.inputs_TB, batch.distinct, masks)
            if len(batch.groups) > 1 or batch.plans[0].num_scored != self.tokens_per_rank(batch):
                return self._by_groups(batch, embedded_TBE, state, masks)
            with autocast(self.precision, batch.device):
                losses, state = self.core_with_loss(embedded_TBE, batch.targets_TB, batch.plans[0], state, masks)
            torch.autograd.backward(losses)
            return torch.stack(losses).detach(), detach(state)

    def _by_groups(self, batch: Batch, embedded_TBE: Tensor, state: State, masks: DropoutMasks) -> tuple[Tensor, State]:
        """Gradient accumulation over groups of streams.

        The last group's backward pass continues into the input with the gradients of all groups, so a tied table has
        its complete gradient when ranks exchange theirs.
        """
        group_losses, states = [], []
        grad_TBE = torch.zeros_like(embedded_TBE)
        for number, streams in enumerate(batch.groups):
            last = number == len(batch.groups) - 1
            embedded_TbE = embedded_TBE[:, streams] if last else embedded_TBE.detach()[:, streams].requires_grad_()
            core = self.core_with_loss
            # Ranks exchange gradients only for the last group.
            with nullcontext() if last or not isinstance(core, DistributedDataParallel) else core.no_sync():
                losses, after = self._group(batch, number, embedded_TbE, state, masks)
                if last:
                    torch.autograd.backward([losses, embedded_TBE], [torch.ones_like(losses), grad_TBE])
                else:
                    losses.backward(torch.ones_like(losses))  # type: ignore[no-untyped-call]
                    assert embedded_TbE.grad is not None
                    grad_TBE[:, streams] = embedded_TbE.grad
            group_losses.append(losses.detach())
            states.append(detach(after))
        return torch.stack(group_losses).sum(0), join_streams(states)

    def _group(
        self, batch: Batch, number: int, embedded_TbE: Tensor, state: State, masks: DropoutMasks
    ) -> tuple[Tensor, State]:
        """Return a group's loss and any penalty, both weighted by the group's tokens, and the next state."""
        streams, targets_Tb = batch.groups[number], batch.targets_TB[:, batch.groups[number]]
        state = select_streams(state, streams)
        with autocast(self.precision, batch.device):
            losses, state = self.core_with_loss(embedded_TbE, targets_Tb, batch.plans[number], state, masks.of(streams))
        return torch.stack(losses) * (batch.plans[number].num_scored / self.tokens_per_rank(batch)), state

    def tokens_per_rank(self, batch: Batch) -> float:
        """Scored targets of a rank, on average; padding may differ between ranks."""
        return batch.num_tokens / self.num_ranks
