"""The gradient of one step: forward and backward pass in the run's precision, all streams at once or group by group.

With `trainer.accumulate` the streams of a batch are cut into groups whose gradients are added up before the one update.
The sum is the gradient of the whole batch: dropout is drawn for the whole batch, samples are shared, and each group
counts by its tokens. Only one group's activations are held at a time.

Shapes: T steps, B streams, b of a group, E embedding width, D width of the hidden state.
"""

import torch
from torch import Tensor

from lm.config import Precision
from lm.data.batches import Batch
from lm.model.language_model import LanguageModel, detach
from lm.model.recurrent import Noise, State
from lm.precision import forward_pass, training_products


def add_gradient(
    model: LanguageModel, batch: Batch, state: State, noise: Noise, *, precision: Precision
) -> tuple[Tensor, State]:
    """Add the gradient of a batch's loss to the parameters'; the loss and the state to carry on, without a graph."""
    with training_products(precision):
        if len(batch.groups) > 1:
            return _by_groups(model, batch, state, noise, precision=precision)
        with forward_pass(precision, batch.device):
            loss, state = model.loss(batch, state, noise)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), detach(state)


def _by_groups(
    model: LanguageModel, batch: Batch, state: State, noise: Noise, *, precision: Precision
) -> tuple[Tensor, State]:
    # Words are looked up once for all, because the optimizer is told of a step's rows once.
    embedded_TBE = model.embedding(batch.inputs_TB, batch.rows_U, batch.inverse_TB)
    loss = torch.zeros((), device=batch.device)
    states, grads = [], []
    for number in range(len(batch.groups)):
        part_loss, after, grad_TbE = _group(model, batch, number, embedded_TBE, state, noise, precision=precision)
        loss += part_loss
        states.append(after)
        grads.append(grad_TbE)
    embedded_TBE.backward(torch.cat(grads, dim=1))
    return loss, [
        (torch.cat([output for output, _ in layer], dim=1), torch.cat([cell for _, cell in layer], dim=1))
        for layer in zip(*states, strict=True)
    ]


def _group(
    model: LanguageModel,
    batch: Batch,
    number: int,
    embedded_TBE: Tensor,
    state: State,
    noise: Noise,
    *,
    precision: Precision,
) -> tuple[Tensor, State, Tensor]:
    """One group's share of the loss, its state, and the gradient of its embedded words."""
    streams, targets_Tb = batch.groups[number], batch.targets_TB[:, batch.groups[number]]
    embedded_TbE = embedded_TBE.detach()[:, streams].requires_grad_()
    state = [(output[:, streams], cell[:, streams]) for output, cell in state]
    with forward_pass(precision, batch.device):
        hidden_TbD, state = model.core(embedded_TbE, state, noise.of(streams, num_streams=embedded_TBE.size(1)))
        loss = model.output.loss(hidden_TbD, targets_Tb, batch.plans[number])
    loss = loss * (targets_Tb.numel() / batch.num_tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    assert embedded_TbE.grad is not None
    return loss.detach(), detach(state), embedded_TbE.grad
