"""Speed claims: `python -m lm.benchmark what=layers counts=FILE|zipf`, ratios of interleaved medians in one process."""
