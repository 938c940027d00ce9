"""Embeddings of the most frequent words for TensorBoard's projector, written beside the run's events."""

import shlex
from pathlib import Path

import torch
from torch import Tensor

from lm.data.text.vocabulary import Vocabulary
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
def show_words(model: LanguageModel, vocabulary: Vocabulary, *, num_words: int, folder: Path) -> None:
    """`evaluate.py mode=projector`: write the vectors and print how to view them."""
    try:
        vectors_VE = model.input(torch.arange(min(num_words, len(vocabulary)), device=model.device)).cpu()
        written = write_projector(folder, vectors_VE=vectors_VE, vocabulary=vocabulary, num_words=num_words)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}.") from None
    say(
        f"Embeddings of the {written:,} most frequent words are in {folder / 'projector'}; view them on the Projector "
        f"page of\n  {python_command()} -m tensorboard.main --logdir {shlex.quote(str(folder))}"
    )


def write_projector(folder: Path, *, vectors_VE: Tensor, vocabulary: Vocabulary, num_words: int) -> int:
    """Write the vectors of at most `num_words` words; returns how many."""
    num_words = min(num_words, len(vocabulary))
    vectors = "".join("\t".join(f"{x:.5g}" for x in row) + "\n" for row in vectors_VE[:num_words].tolist())
    rows = zip(vocabulary.words[:num_words], vocabulary.counts[:num_words], strict=True)
    words = "word\tcount\n" + "".join(f"{word}\t{count}\n" for word, count in rows)
    (folder / "projector").mkdir(exist_ok=True)
    for name, text in {
        "projector/vectors.tsv": vectors,
        "projector/words.tsv": words,
        "projector_config.pbtxt": CONFIG,  # last, because TensorBoard looks for it
    }.items():
        write_text(folder / name, text)
    return num_words
