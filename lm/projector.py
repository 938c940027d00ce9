"""Word vectors for TensorBoard's projector: the embeddings of the most frequent words, beside the run's events."""

from pathlib import Path

from torch import Tensor

from lm.data.vocabulary import Vocabulary
from lm.files import write_whole

CONFIG = """\
embeddings {
  tensor_name: "word embeddings"
  tensor_path: "projector/vectors.tsv"
  metadata_path: "projector/words.tsv"
}
"""


def write_projector(folder: Path, *, vectors_VE: Tensor, vocabulary: Vocabulary, num_words: int) -> int:
    """Write so many words, or all there are; how many it was."""
    num_words = min(num_words, len(vocabulary))
    vectors = "".join("\t".join(f"{x:.5g}" for x in row) + "\n" for row in vectors_VE[:num_words].tolist())
    rows = zip(vocabulary.words[:num_words], vocabulary.counts[:num_words], strict=True)
    words = "word\tcount\n" + "".join(f"{word}\t{count}\n" for word, count in rows)
    (folder / "projector").mkdir(exist_ok=True)
    for name, text in {
        "projector/vectors.tsv": vectors,
        "projector/words.tsv": words,
        "projector_config.pbtxt": CONFIG,  # last, because it is what TensorBoard looks for
    }.items():
        write_whole(folder / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    return num_words
