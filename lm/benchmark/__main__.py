"""python -m lm.benchmark what=layers [counts=FILE|zipf] [cutoffs=2000,10000] [layers=full,adaptive] ...

Prints a table and writes it to `out` (benchmark.json). `what=layers` compares the output layers; its settings are in
`layers.py`.
"""

import sys

from lm.benchmark.arguments import fill, split
from lm.benchmark.layers import LayersSettings, run_layers
from lm.errors import UserError


def main(words: list[str]) -> int:
    try:
        pairs = split(words)
        what = pairs.pop("what", None)
        if what != "layers":
            raise UserError(f"what must be one of: layers; got {what!r}. Try python -m lm.benchmark what=layers")
        run_layers(fill(LayersSettings, pairs))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
