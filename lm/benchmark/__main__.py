"""python -m lm.benchmark what=layers|cores|inputs|step|training|clusters|prepare|ngram|distributed|gpu ...

Each benchmark prints a table and writes it to `out` (benchmark.json). Its settings: what=layers --help.

layers       training step of every output layer, compared with torch's modules
cores        training step of every core, compared with torch's modules
inputs       training step with every input, compared with the table
step         the whole training step, compared with a plain PyTorch step
training     overhead of a real run: loader, logging, progress
clusters     quality of the automatic cutoffs, and the paper's Figures 1 to 3
prepare      speed and memory of text preparation
ngram        speed and memory of counting n-grams, and of scoring with them
distributed  several processes, compared with several threads
gpu          all that is worth knowing of a GPU in one report: its tests, layers, steps, clusters
"""

import sys
from importlib import import_module

from lm.system.errors import UserError

BENCHMARKS = ("layers", "cores", "inputs", "step", "training", "clusters", "prepare", "ngram", "distributed", "gpu")


def main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    from lm.benchmark.arguments import HELP, split  # imports torch, which the help does without

    try:
        pairs = split(words)
        what = pairs.pop("what", None)
        if what not in BENCHMARKS:
            raise UserError(
                f"what must be one of: {', '.join(BENCHMARKS)}; got {what!r}. Try python -m lm.benchmark what=layers"
            )
        benchmark = import_module(f"lm.benchmark.{what}")
        if HELP in pairs:
            print(benchmark.__doc__)
        benchmark.main(pairs)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
