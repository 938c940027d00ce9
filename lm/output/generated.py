"""`trainer.compile`: the one part of a step for which generated code is worth a try.

Of a step, torch's compiler refuses the LSTM, which is a library's kernel anyway; products are a library's too; the
optimizer's dense update is one fused kernel. What remains are the passes over each chunk of logits between its
products: find the largest, subtract, exponentiate, sum. They are limited by memory, and generated code joins them: two
passes for five. It is meant for GPUs, whose products are faster than their memory. On a CPU, where a chunk stays in the
cache, the passes take a few hundredths of a step, and nothing was gained in our measurements.

The sizes of a chunk are dynamic: a cluster has another number of tokens in every batch, and all chunks share a few
compilations.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lm.output.base import OutputLayer
from lm.output.row_loss import SoftmaxInPlace
from lm.system.errors import UserError


def compile_loss(output: OutputLayer, *, device: torch.device, notice: Callable[[str], None]) -> None:
    """Make the layer's fused loss use generated code; reports now, not mid-run, if this machine cannot compile."""
    notice("compiling the output layer's loss (trainer.compile=true)")
    compiled = compiled_softmax()
    try:
        with torch.no_grad():
            for rows, words in ((3, 40), (5, 70)):
                logits_nK, target_n1 = torch.zeros(rows, words, device=device), torch.zeros(rows, 1, device=device)
                compiled(logits_nK, target_n1.long())
    except Exception as error:  # whatever fails in a compiler, or for want of one
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"trainer.compile=true does not work on this machine ({reason[:200]}); it needs a C++ compiler, such as "
            "g++, and on a GPU Triton. Try trainer.compile=false"
        ) from None
    output.softmax_in_place = compiled


def joined_softmax(logits_nP: Tensor, target_n1: Tensor) -> Tensor:
    """What `softmax_in_place` does, in a form that the compiler makes two passes of."""
    score_n1 = logits_nP.gather(1, target_n1)
    largest_n1 = logits_nP.amax(1, keepdim=True)
    exps_nP = (logits_nP - largest_n1).exp()
    sum_n1 = exps_nP.sum(1, keepdim=True)
    logits_nP.copy_(exps_nP / sum_n1)
    return sum_n1.log() + largest_n1 - score_n1


@cache
def compiled_softmax() -> SoftmaxInPlace:
    """Compiled once for all layers and sizes."""
    return torch.compile(joined_softmax, dynamic=True)
