"""python -m lm.benchmark what=layers|step|training|clusters|prepare|distributed [counts=FILE|zipf] ...

Prints a table and writes it to `out` (benchmark.json). `what=layers` compares the output layers, `what=step` the whole
training step, both with what torch offers; `what=training` says what a run costs beyond its steps; `what=clusters` puts
the choice of clusters to the test and draws the paper's Figures 1 to 3; `what=prepare` times the preparation of a text,
`what=distributed` training on several processes. Their settings are in the files of those names.
"""

import sys

from lm.benchmark.arguments import fill, split
from lm.benchmark.clusters import ClustersSettings, run_clusters
from lm.benchmark.distributed import DistributedSettings, run_distributed
from lm.benchmark.layers import LayersSettings, run_layers
from lm.benchmark.prepare import PrepareSettings, run_prepare
from lm.benchmark.step import StepSettings, run_step
from lm.benchmark.training import run_training
from lm.system.errors import UserError


def main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    try:
        pairs = split(words)
        what = pairs.pop("what", None)
        if what == "layers":
            run_layers(fill(LayersSettings, pairs))
        elif what == "clusters":
            run_clusters(fill(ClustersSettings, pairs))
        elif what == "prepare":
            run_prepare(fill(PrepareSettings, pairs))
        elif what == "step":
            run_step(fill(StepSettings, pairs))
        elif what == "training":
            run_training(pairs)
        elif what == "distributed":
            run_distributed(fill(DistributedSettings, pairs))
        else:
            raise UserError(
                f"what must be one of: layers, step, training, clusters, prepare, distributed; got {what!r}. "
                "Try python -m lm.benchmark what=layers"
            )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
