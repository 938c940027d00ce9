"""What a corpus was made of and how, in a few lines."""

from collections.abc import Mapping
from typing import Any

from lm.data.text.subwords import SubwordVocabulary
from lm.data.text.vocabulary import Vocabulary
from lm.system.console import byte_size, table


def summary(meta: Mapping[str, Any], *, vocabulary: Vocabulary) -> str:
    """Source, checksum, rule, words kept, the marks with their counts, and the splits, as meta.json records them."""
    archive = meta.get("archive", {})
    facts = {"source": meta["source"]} | {key: archive[key] for key in ("path", "url", "sha256") if key in archive}
    if "size" in archive:
        facts["size"] = f"{archive['size']:,} bytes ({byte_size(archive['size'])})"
    facts |= {key: _told(value) for key, value in meta["rule"].items()}
    unknown, ends = (int(vocabulary.counts[number]) for number in (vocabulary.unk_id, vocabulary.eos_id))
    pieces = isinstance(vocabulary, SubwordVocabulary)
    facts["vocabulary"] = (
        f"{len(vocabulary):,} {'pieces' if pieces else 'words'}, among them <unk> ({unknown:,} times in training) "
        f"and </s> ({ends:,})"
    )
    width = max(map(len, facts))
    lines = [f"{key.ljust(width)}  {value}" for key, value in facts.items()]
    rows = [
        [split, f"{f['tokens']:,}", f"{f['words']:,}", f"{f['characters']:,}", f"{f['oov'] / f['tokens']:.2%}"]
        + ([f"{1 - f['known_word_tokens'] / f['word_tokens']:.2%}"] if pieces else [])
        for split, f in meta["splits"].items()
    ]
    header = ["split", "tokens", "words", "characters", "<unk>", *(["rare words"] if pieces else [])]
    return "\n".join([*lines, "", table(rows, header=header)])


def _told(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
