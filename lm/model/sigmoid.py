"""A recurrent layer with a sigmoid, which torch does not have, on its kernel for the tanh.

sigmoid(z) = (1 + tanh(z / 2)) / 2. So h_t = sigmoid(A x_t + R h_{t-1} + b) is (1 + g_t) / 2 with
g_t = tanh(A/2 x_t + R/4 g_{t-1} + b/2 + R/4 1).

Shapes: T steps, B streams, E width of the input, H cell width.
"""

import torch
from torch import Tensor, nn


class SigmoidRNN(nn.RNN):
    """One layer of h_t = sigmoid(A x_t + R h_{t-1} + b)."""

    def forward(self, input_TBE: Tensor, before_1BH: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        input_HE, recurrent_HH, *biases = self.all_weights[0]
        bias_H = recurrent_HH.sum(1) / 4
        for one_H in biases:
            bias_H = bias_H + one_H / 2
        weights = [input_HE / 2, recurrent_HH / 4, bias_H, torch.zeros_like(bias_H)]
        hidden_TBH, after_1BH = torch.rnn_tanh(
            input_TBE, 2 * before_1BH - 1, weights, True, 1, 0.0, self.training, False, False
        )
        return (1 + hidden_TBH) / 2, (1 + after_1BH) / 2
