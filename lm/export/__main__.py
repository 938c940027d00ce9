"""Export a trained model, to run without this project.

python -m lm.export checkpoint=runs/NAME out=model.onnx                  all log-probabilities, and the state
python -m lm.export checkpoint=runs/NAME out=model.onnx quantize=int8    a quarter of the size
python -m lm.export checkpoint=runs/NAME out=model.onnx scores=targets   only those of given targets; topk: the best k
python -m lm.export checkpoint=runs/NAME out=model.pt2 format=torch      a torch.export program
"""

from lm.cli import command
from lm.config.inference import ExportConfig


@command("export", ExportConfig)
def start(config: ExportConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.export.run import export

    export(config)


if __name__ == "__main__":
    start()
