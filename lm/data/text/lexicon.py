"""A given vocabulary: the first column of a text file, as in a list of words or a pronunciation lexicon."""

from pathlib import Path

from lm.system.errors import UserError


def read_lexicon(path: str, *, lowercase: bool) -> frozenset[str]:
    """Its distinct words; what follows a word on its line (a count, a pronunciation) is ignored."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"data.vocabulary must name a text file with a word on each line; {path!r} cannot be read: {reason}"
        ) from None
    columns = (line.split(maxsplit=1) for line in (text.lower() if lowercase else text).split("\n"))
    words = frozenset(column[0] for column in columns if column)
    if not words:
        raise UserError(f"data.vocabulary must name a text file with a word on each line; {path!r} holds none")
    return words
