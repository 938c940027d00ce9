"""What a preparation did, in a few lines."""

from collections.abc import Mapping
from typing import Any

from lm.data.vocabulary import Vocabulary


def summary(meta: Mapping[str, Any], *, vocabulary: Vocabulary, seconds: float) -> str:
    """Rule, words kept, the marks with their counts, and the splits, from what meta.json records."""
    rule, splits = meta["rule"], meta["splits"]
    marks = {"</s>": vocabulary.eos_id, "<unk>": vocabulary.unk_id}
    counts = [f"{mark} {vocabulary.counts[number]:,} times" for mark, number in marks.items()]
    lines = {key: ("no", "yes")[value] if isinstance(value, bool) else value for key, value in rule.items()}
    lines["kept"] = ", ".join([f"{len(vocabulary) - 2:,} words", *counts])
    for split, record in splits.items():
        lines[split] = (
            f"{record['tokens']:,} tokens, {record['words']:,} words, {record['characters']:,} characters; "
            f"{record['oov'] / record['tokens']:.2%} <unk>"
        )
    megabytes = sum(record["bytes"] for record in splits.values()) / 1e6
    lines["speed"] = f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s"
    width = max(map(len, lines))
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in lines.items())
