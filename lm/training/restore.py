"""Restore models and vocabularies from checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.config.registry import find_plugin
from lm.config.schema import TrainConfig
from lm.config.validate import make_config
from lm.data.text.subwords import open_vocabulary
from lm.data.text.vocabulary import Vocabulary
from lm.model.build import build_model
from lm.model.language_model import LanguageModel
from lm.system import checkpoint
from lm.system.errors import UserError
from lm.training.averaging import use_average


def restore(
    content: dict[str, Any], *, path: Path, device: torch.device
) -> tuple[LanguageModel, Vocabulary, TrainConfig]:
    """Build the model in a checkpoint, with pending decay applied or, if enabled, EMA weights."""
    with checkpoint.explain_damage(path):
        config = make_config(content["config"], TrainConfig)
        vocabulary = unpack_vocabulary(content)
        with torch.device("meta"):
            checkpoint.check_shapes(content["model"], build_model(config, vocabulary), path=path)
        model = build_model(config, vocabulary)
        model.load_state_dict(content["model"])
        find_plugin("optim", config.optim.name).target.finish_weights(model, content["optimizer"], config.optim)
        use_average(model, content.get("average"))
    return model.to(device), vocabulary, config


def pack_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return a vocabulary's files as byte tensors, and its hash."""
    files = {name: torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for name, data in vocabulary.files().items()}
    return {"hash": vocabulary.hash, "files": files}


def unpack_vocabulary(content: dict[str, Any]) -> Vocabulary:
    """Read the vocabulary in a checkpoint."""
    packed = content["vocabulary"]
    vocabulary = open_vocabulary({name: data.numpy().tobytes() for name, data in packed["files"].items()})
    if vocabulary.hash != packed["hash"]:
        raise UserError("Corrupt checkpoint: vocabulary hash mismatch.")
    return vocabulary
