"""Embeddings of the most frequent words for TensorBoard's projector, written next to the run's events."""

import shlex

import torch

from lm.config.inference import EvaluateConfig
from lm.inference.open_model import LoadedModel
from lm.model.language_model import LanguageModel
from lm.system.console import python_command, say
from lm.system.errors import UserError
from lm.system.files import write_text

CONFIG = """\
embeddings {
  tensor_name: "word embeddings"
  tensor_path: "projector/vectors.tsv"
  metadata_path: "projector/words.tsv"
}
"""


@torch.no_grad()
def show_words(config: EvaluateConfig, loaded: LoadedModel) -> None:
    """`evaluate.py mode=projector`: write the vectors and print how to view them."""
    model, vocabulary, folder = loaded.model, loaded.vocabulary, loaded.folder
    if not isinstance(model, LanguageModel):
        raise UserError(f"mode=projector needs the embeddings of a neural model; {loaded.file} has none.")
    num_words = min(config.words, len(vocabulary))
    vectors_VE = model.input(torch.arange(num_words, device=model.device)).cpu()
    vectors = "".join("\t".join(f"{x:.5g}" for x in row) + "\n" for row in vectors_VE.tolist())
    rows = zip(vocabulary.words[:num_words], vocabulary.counts[:num_words], strict=True)
    words = "word\tcount\n" + "".join(f"{word}\t{count}\n" for word, count in rows)
    try:
        (folder / "projector").mkdir(exist_ok=True)
        write_text(folder / "projector/vectors.tsv", vectors)
        write_text(folder / "projector/words.tsv", words)
        write_text(folder / "projector_config.pbtxt", CONFIG)  # last, because TensorBoard looks for it
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}.") from None
    say(
        f"Embeddings of the {num_words:,} most frequent words are in {folder / 'projector'}; view them on the "
        f"Projector page of\n  {python_command()} -m tensorboard.main --logdir {shlex.quote(str(folder))}"
    )
