"""Score a trained model, or text with it.

python evaluate.py checkpoint=runs/NAME                          the run's own validation and test text
python evaluate.py checkpoint=runs/NAME data.dir=PATH            other text, with the run's vocabulary
python evaluate.py checkpoint=runs/NAME mode=score input=FILE    log-probabilities of each line and word; - is stdin
python evaluate.py checkpoint=runs/NAME mode=surprisal input=FILE   a table of tokens: surprisal, entropy, rank
python evaluate.py checkpoint=runs/NAME mode=topk prompt="..."   the most likely next words
python evaluate.py checkpoint=runs/NAME mode=projector           word embeddings for TensorBoard's projector
python evaluate.py checkpoint=runs/NAME mix=[runs/OTHER]         mixed with another model; weights by EM
python evaluate.py checkpoint=runs/NAME cache=unigram            with a cache of the last words

mode=score writes a line for each line of the input: log-probability, number of tokens (</s> included), number of
unknown words, log-probability of each token, the tokens with <unk> for unknown words. An empty line is a sentence of
</s> alone with state=reset; with state=carried it is skipped, as in training (0 tokens). mode=topk writes the line
number, the probability and the word. Columns are separated by tabs; format=jsonl writes objects instead. Logarithms are
natural. format=nbest reads and writes n-best lists: `id text`, or id, scores and text separated by tabs.
"""

from lm.cli import command
from lm.config.inference import EvaluateConfig


@command("evaluate", EvaluateConfig)
def start(config: EvaluateConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.inference.evaluate import evaluate

    evaluate(config)


if __name__ == "__main__":
    start()
