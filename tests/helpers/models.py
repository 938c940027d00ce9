"""A small model behind each of the seven output layers, and the plain way to ask it for probabilities."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lm.config.schema import TrainConfig
from lm.data.text.vocabulary import Vocabulary
from lm.model.build import build_model
from lm.model.language_model import LanguageModel

VOCABULARY = Vocabulary.from_counts([(f"w{i}", 50 - i) for i in range(9)], min_count=1)
CUTOFFS = ["output.cutoffs=[3,7]", "model.hidden_size=32"]
LAYERS = {
    "full": [],
    "sampled": [],
    "hsm_freq": [],
    "hsm_sim": [],
    "dsoftmax": CUTOFFS,
    "dsoftmax_star": CUTOFFS,
    "adaptive": CUTOFFS,
}


def small_model(tiny: Callable[..., TrainConfig], layer: str = "adaptive") -> LanguageModel:
    """Untrained, but with weights so large that it has opinions."""
    model = build_model(tiny(f"output={layer}", "model.layers=2", *LAYERS[layer]), VOCABULARY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.eval()


@torch.no_grad()
def log_distributions(model: LanguageModel, words: Sequence[int], *, eos_id: int = VOCABULARY.eos_id) -> list[Tensor]:
    """The log-distribution of each word and of the one after them, read word by word from `</s>` and the zero state."""
    state, found = model.initial_state(1), []
    for word in [eos_id, *words]:
        hidden, state = model(torch.tensor([[word]]), state)
        found.append(model.output.log_prob(hidden)[0, 0])
    return found
