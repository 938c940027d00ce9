"""Export a trained model, to run without this project.

python -m lm.export checkpoint=runs/NAME out=model.onnx                  all log-probabilities, and the state
python -m lm.export checkpoint=runs/NAME out=model.onnx quantize=int8    a quarter of the size
python -m lm.export checkpoint=runs/NAME out=model.onnx scores=targets   only those of given targets; topk: the best k
python -m lm.export checkpoint=runs/NAME out=model.pt2 format=torch      a torch.export program
"""

import hydra

from lm.cli import run, task
from lm.config.inference import ExportConfig


@hydra.main(version_base="1.3", config_path=None, config_name="export")
@task(ExportConfig)
def main(config: ExportConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.export.run import export

    export(config)


def start() -> None:
    run(main, name="export", schema=ExportConfig)


if __name__ == "__main__":
    start()
