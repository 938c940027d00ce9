"""Train word-level language models over very large vocabularies.

For use from Python: `lm.load("runs/NAME").next_word("the object has a", k=5)`; see `lm.inference.api`.
"""

from typing import Any

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # Import torch lazily, so that --help is fast.
    if name == "load":
        from lm.inference.api import load

        return load
    raise AttributeError(name)
