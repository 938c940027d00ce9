"""`trainer.compile`: the one part of a step that generated code makes faster.

Of a step, torch's compiler refuses the LSTM, which is a library's kernel anyway; products are a library's too; the
optimizer's dense update is one fused kernel. What remains are the passes over each chunk of logits between its
products: find the largest, subtract, exponentiate, sum. They are limited by memory, and generated code joins them: two
passes for five. On a CPU they take a few hundredths of a step, a fourth of which is saved; a GPU, whose products are
faster than its memory, has more to gain.

The sizes of a chunk are dynamic: a cluster has another number of tokens in every batch, and all chunks share a few
compilations.
"""

from collections.abc import Callable
from functools import cache

import torch

from lm.errors import UserError
from lm.output.base import OutputLayer
from lm.output.fused import Exponentials, exponentials_in_place


def compile_loss(output: OutputLayer, *, device: torch.device, notice: Callable[[str], None]) -> None:
    """Make the layer's fused loss use generated code; a machine that cannot compile is told now, not in mid-run."""
    notice("compiling the output layer's loss (trainer.compile=true)")
    compiled = compiled_exponentials()
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
    output.exponentials = compiled


@cache
def compiled_exponentials() -> Exponentials:
    """Compiled once for all layers and sizes."""
    return torch.compile(exponentials_in_place, dynamic=True)
