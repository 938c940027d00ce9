"""Score a trained model, or text with it.

python evaluate.py checkpoint=runs/NAME                          perplexity of the run's own validation and test text
python evaluate.py checkpoint=runs/NAME data.dir=PATH            other text, with the run's vocabulary
python evaluate.py checkpoint=runs/NAME mode=score input=FILE    log-probabilities of each line and word
python evaluate.py checkpoint=runs/NAME mode=topk prompt="..."   the most likely next words
python evaluate.py checkpoint=runs/NAME mode=projector           word embeddings for TensorBoard's projector
python evaluate.py checkpoint=runs/NAME mix=[runs/OTHER]         the same, mixed with another model
"""

from lm.config.command_line import command
from lm.config.commands import EvaluateConfig


def main(config: EvaluateConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.runs.evaluation import evaluate  # torch is imported here, so that --help and mistakes answer at once

    evaluate(config)


if __name__ == "__main__":
    command(main, name="evaluate", schema=EvaluateConfig)
