"""Hashes of what small runs compute, to the last bit: equal before and after a change that must change nothing.

    python -m tests.fingerprints > before        # on one commit
    python -m tests.fingerprints > after         # on another, on the same machine
    diff before after
    python -m tests.fingerprints full gru        # only training runs with these words in their names

Every output layer, core, input and optimizer, every form of the word table, dropout, decay, EMA, n-gram weights,
micro-batches, bfloat16 and two ranks; then n-gram models, mixtures, caches, scores of lines and generated text.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

ROOT = Path(__file__).resolve().parent.parent
TIMES = ("time", "train_seconds", "eval_seconds", "speed/", "memory/")
COMMON = """
    data=zipf data.vocab_size=60 data.tokens=3000 model=small model.embedding_size=8 model.hidden_size=16
    model.dropout=0.2 trainer.batch_size=8 trainer.bptt=5 trainer.max_epochs=null trainer.max_steps=60
    trainer.eval_every_steps=25 trainer.log_every_steps=7 trainer.threads=1 evaluate.streams=3 optim.weight_decay=1e-4
""".split()  # noqa: SIM905
LAYERS = {
    "full": "output=full",
    "sampled": "output=sampled",
    "hsm_freq": "output=hsm_freq",
    "hsm_sim": "output=hsm_sim",
    "dsoftmax": "output=dsoftmax output.cutoffs=[10,30]",
    "dsoftmax_star": "output=dsoftmax_star output.cutoffs=[10,30]",
    "adaptive": "output=adaptive output.cutoffs=[10,30]",
}
RUNS = {
    **LAYERS,
    "rowwise": "output=full {embedding}=rowwise",
    "dense": "output=full {embedding}=dense",
    "projected": "output=full model.layers=2 model.projection=8",
    "micro-batches": "output=sampled {micro_batches}=3",
    "bf16": "output=adaptive output.cutoffs=[10,30] trainer.precision=bf16",
}
RANKS = {f"{name}, 2 ranks": text for name, text in LAYERS.items()}
MORE = {
    "hsm_huffman": "output=hsm_huffman",
    "nce": "output=nce",
    "blackout": "output=blackout",
    "self_normalized": "output=self_normalized",
    "leaf, head bias": "output=adaptive output.cutoffs=[10,30] output.shortlist=false output.head_bias=true",
    "gru": "model=gru output=full",
    "rnn": "model=rnn output=full",
    "irnn": "model=irnn output=full optim.lr=0.01",
    "scrn": "model=scrn output=full",
    "feedforward": "model=feedforward output=full",
    "transformer": "model=transformer model.memory=7 output=full optim=adam optim.lr=0.01",
    "lstm, 2 layers, tied": "output=full model.layers=2 model.embedding_size=16 model.tie=true",
    "adaptive input": "input=adaptive input.cutoffs=[10,30] output=adaptive output.cutoffs=[10,30]",
    "char_cnn": "input=char_cnn output=full",
    "maxent": "output=hsm_freq model.maxent.order=3 model.maxent.size=4096",
    "maxent, adaptive": "output=adaptive output.cutoffs=[10,30] model.maxent.order=2 model.maxent.size=4096",
    "ema, cosine": "output=full trainer.average=0.9 optim.schedule=cosine",
    "adam": "output=full optim=adam optim.lr=0.01 optim.warmup_steps=5",
    "adagrad_adam": "output=adaptive output.cutoffs=[10,30] optim=adagrad_adam optim.core_weight_decay=0.1",
    "sgd": "output=full optim=sgd optim.lr=0.5 optim.schedule=plateau",
    "rmsprop": "output=full optim=rmsprop optim.lr=0.01 {embedding}=rowwise",
    "token loss": "output=full optim.reduction=token",
}
EVALUATIONS = {
    "evaluation": "evaluate.py checkpoint=adaptive",
    "mixture": "evaluate.py checkpoint=adaptive mix=[ngram,gru]",
    "mixture, given": "evaluate.py checkpoint=full mix=[maxent] weights=[0.4,0.6]",
    "n-gram": "evaluate.py checkpoint=ngram",
    "unigram cache": "evaluate.py checkpoint=adaptive cache=unigram cache_size=50 cache_decay=0.01 cache_weight=0.1",
    "continuous cache": "evaluate.py checkpoint=full cache=continuous cache_size=40 cache_theta=0.3 cache_weight=0.1",
    "fitted cache": "evaluate.py checkpoint=adaptive cache=unigram",
    "scores": "evaluate.py checkpoint=hsm_freq mode=score input=lines.txt",
    "carried scores": "evaluate.py checkpoint=maxent mode=score input=lines.txt state=carried format=jsonl",
    "top words": "evaluate.py checkpoint=adaptive mode=topk input=lines.txt k=7",
    "generated": "-m lm.generate checkpoint=adaptive samples=2 max_words=30",
    "generated, top_p": "-m lm.generate checkpoint=hsm_freq samples=2 max_words=30 top_p=0.8 temperature=0.7",
    "generated, top_k": "-m lm.generate checkpoint=full samples=2 max_words=30 top_k=9 unknown_words=true",
    "generated, mixture": "-m lm.generate checkpoint=adaptive mix=[ngram] weights=[0.5,0.5] max_words=30",
}
LINES = "w3 w1 w7\nw2\n\nw15 w1 w1 nothing w30\n"
KEYS = {"embedding": "optim.embedding", "micro_batches": "trainer.micro_batches"}
"""Settings whose names may change."""


def main() -> None:
    wanted = sys.argv[1:]
    with TemporaryDirectory() as folder:
        for name, text in {**RUNS, **MORE, **RANKS}.items():
            if wanted and not any(word in name for word in wanted):
                continue
            run = Path(folder) / name.replace(" ", "-").replace(",", "")
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if "ranks" in name else []
            settings = [*COMMON, *text.format(**KEYS).split(), f"run_dir={run}", "data.root=data"]
            call(folder, *launch, str(ROOT / "train.py"), *settings)
            print(f"{name:22} figures {figures(run)}  state {state(run)}", flush=True)
        if wanted:
            return
        data = [text for text in COMMON if text.startswith("data")]
        call(folder, "-m", "lm.ngram", *data, "order=3", "run_dir=ngram", "data.root=data", "out=ngram.arpa")
        print(f"{'n-gram counts':22} arpa {digest((Path(folder) / 'ngram.arpa').read_text())}", flush=True)
        (Path(folder) / "lines.txt").write_text(LINES)
        for name, text in EVALUATIONS.items():
            writes_json = "mode=" not in text and "lm.generate" not in text
            output = call(folder, *text.split(), *(["json=found.json"] if writes_json else []))
            json_file = Path(folder) / "found.json"
            if json_file.exists():
                output = json.dumps(perplexities(json.loads(json_file.read_text())), sort_keys=True)
                json_file.unlink()
            print(f"{name:22} output {digest(output)}", flush=True)


def call(folder: str, *arguments: str) -> str:
    """Run a command in a folder; return what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script, *rest = arguments
    script = str(ROOT / script) if script == "evaluate.py" else script
    done = subprocess.run([sys.executable, script, *rest], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stderr}")
    return done.stdout


def perplexities(tree: object) -> object:
    """Return an evaluation's numbers except speeds, rounded to nine digits."""
    if isinstance(tree, dict):
        return {key: perplexities(value) for key, value in tree.items() if "second" not in key}
    if isinstance(tree, list):
        return [perplexities(value) for value in tree]
    return f"{tree:.9g}" if isinstance(tree, float) else tree


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def figures(run: Path) -> str:
    """Hash the logged metrics, except times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in r.items() if not key.startswith(TIMES)} for r in records]
    return digest(json.dumps(kept, sort_keys=True))


def state(run: Path) -> str:
    """Hash all tensors in last.pt except the vocabulary: weights, optimizer state, hidden state."""
    content = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    total = hashlib.sha256()
    for tensor in tensors({key: value for key, value in content.items() if key != "vocabulary"}):
        total.update(tensor.double().contiguous().numpy().tobytes())  # by value, whatever type holds it
    return total.hexdigest()[:16]


def tensors(tree: object) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


if __name__ == "__main__":
    main()
