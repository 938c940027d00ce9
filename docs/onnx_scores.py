"""Print the log-probability and the number of tokens of each line of standard input, with onnxruntime alone.

python onnx_scores.py model.onnx < FILE     (exported with scores=targets)
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

path = Path(sys.argv[1])
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
metadata = session.get_modelmeta().custom_metadata_map
eos_id, unk_id = int(metadata["eos_id"]), int(metadata["unk_id"])
lines = path.with_suffix(".vocab.tsv").read_bytes().decode().split("\n")
word_ids = {line.rpartition("\t")[0]: number for number, line in enumerate(lines)}


def zero_state(batch: int) -> dict[str, np.ndarray]:
    shapes = {each.name: each.shape for each in session.get_inputs() if each.name.startswith("state_")}
    return {
        name: np.zeros([batch if size == "batch" else size for size in shape], np.float32)
        for name, shape in shapes.items()
    }


for line in sys.stdin:
    words = [word_ids.get(word, unk_id) for word in line.split()] + [eos_id]
    state, total = zero_state(batch=1), 0.0
    for start in range(0, len(words), 32):
        targets = np.array([words[start : start + 32]])
        previous = np.array([[eos_id, *words][start : start + targets.size]])
        log_probs, *new = session.run(None, {"ids": previous, "targets": targets, **state})
        state = dict(zip(state, new, strict=True))
        total += float(log_probs.sum())
    print(f"{total:.4f}\t{len(words)}")
