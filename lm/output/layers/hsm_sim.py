"""Class-based hierarchical softmax with classes by similarity ("HSM (sim)" in section 5): Brown classes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lm.config.registry import plugin
from lm.data.brown import brown_classes
from lm.data.corpus import Corpus
from lm.output.class_hierarchy import HierarchicalConfig, HierarchicalSoftmax


@dataclass
class SimilarityConfig(HierarchicalConfig):
    """Hierarchical softmax with Brown classes."""

    name: str = "hsm_sim"


@plugin("output", "hsm_sim", SimilarityConfig)
class SimilaritySoftmax(HierarchicalSoftmax):
    """Words in a class occur in similar contexts; the classes are found once and kept beside the corpus."""

    @classmethod
    def word_classes(
        cls, settings: HierarchicalConfig, corpus: Corpus, *, notice: Callable[[str], None]
    ) -> NDArray[Any]:
        return brown_classes(
            corpus.split("train"),
            vocab_size=len(corpus.vocabulary),
            num_classes=settings.classes_for(len(corpus.vocabulary)),
            cache_dir=corpus.path,
            corpus_hash=corpus.meta["splits"]["train"]["sha256"],
            notice=notice,
        )
