"""What a preparation did, in a few lines."""

from collections.abc import Mapping
from typing import Any

from lm.data.vocabulary import Vocabulary


def summary(meta: Mapping[str, Any], *, vocabulary: Vocabulary, seconds: float) -> str:
    """Rule, words kept, the marks with their counts, and the splits, from what meta.json records."""
    rule, splits = meta["rule"], meta["splits"]
    kept = f"{len(vocabulary) - 2:,} words"
    if "min_count" in rule:
        kept += f" seen at least {rule['min_count']} times in training"
    marks = {"</s>": vocabulary.eos_id, "<unk>": vocabulary.unk_id}
    lines = {"rule": "; ".join(f"{key} {_told(value)}" for key, value in rule.items())}
    lines["kept"] = ", ".join(
        [kept, *(f"{mark} {vocabulary.counts[number]:,} times" for mark, number in marks.items())]
    )
    for split, record in splits.items():
        lines[split] = (
            f"{record['tokens']:,} tokens, {record['words']:,} words, {record['characters']:,} characters; "
            f"{record['oov'] / record['tokens']:.2%} <unk>"
        )
    megabytes = sum(record["bytes"] for record in splits.values()) / 1e6
    lines["speed"] = f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:,.0f} MB/s"
    return "\n".join(f"  {name:<6} {text}" for name, text in lines.items())


def _told(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
