"""The root of each group's settings: what every option of the group has, whichever plug-in it comes from."""

from dataclasses import dataclass
from enum import Enum


@dataclass
class DataConfig:
    """A corpus: where it comes from and how its text becomes words."""

    name: str
    """The corpus, as in `data=pydoc`."""
    root: str
    """Folder under which prepared corpora are kept, one folder each."""

    @property
    def shuffles_shards(self) -> bool:
        """Whether each epoch reads the training shards in a new order."""
        return False


class EncodingErrors(Enum):
    """What to do with invalid bytes."""

    strict = "strict"
    replace = "replace"

    @property
    def tag(self) -> str:
        """Suffix of the prepared corpus's folder."""
        return "" if self is EncodingErrors.strict else f"-{self.value}"
