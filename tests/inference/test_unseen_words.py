"""OOV words read by their characters: the following text is predicted better than after <unk>."""

import math
import random
from pathlib import Path

import pytest

import lm
from lm.model.base import Input
from tests.conftest import run_command

ENDINGS = {"ing": "slowly", "ed": "quickly", "er": "home", "s": "again"}
"""Each word ending determines the next word."""


def stems(number: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choice("bdfgklmnprtvz") + draw.choice("aeiou") for _ in range(3)) for _ in range(number)]


def sentences(roots: list[str], number: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    made = []
    for _ in range(number):
        ending = draw.choice(list(ENDINGS))
        made.append(f"we {draw.choice(roots)}{ending} {ENDINGS[ending]}")
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of such sentences; words that occur once in training are OOV."""
    folder = tmp_path_factory.mktemp("letters")
    (folder / "text").mkdir()
    train = sentences(stems(30, seed=0), 600, seed=1) + sentences(stems(400, seed=2), 60, seed=3)
    random.Random(4).shuffle(train)
    for split, lines in [("train", train), ("valid", train[:50]), ("test", train[:50])]:
        (folder / "text" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    settings = """data=text data.dir=text data.min_count=2 input=char_cnn input.filters=[8,16,16,16]
        input.byte_size=8 output=full model.embedding_size=16 model.hidden_size=24 model.dropout=0 trainer.batch_size=16
        trainer.max_epochs=12 trainer.threads=1 run_dir=run"""
    run_command(folder, "train.py", *settings.split())
    return folder / "run"


def test_characters_of_oov_words_improve_predictions(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = lm.load(run), sentences(stems(50, seed=5), 60, seed=6)

    def perplexity() -> float:
        """Perplexity of the words right after OOV words."""
        scores = [model.score(text) for text in texts]
        assert all(score.tokens[1] == "<unk>" for score in scores)
        return math.exp(-sum(score.log_probs[2] for score in scores) / len(scores))

    by_letters = perplexity()
    monkeypatch.setattr(type(model.model.input), "ids_of_unseen", Input.ids_of_unseen)
    assert by_letters < 0.5 * perplexity()


def test_line_scores_match_api_scores(run: Path) -> None:
    texts = sentences(stems(50, seed=5), 20, seed=6)
    (run.parent / "lines.txt").write_text("\n".join(texts) + "\n")
    done = run_command(run.parent, "evaluate.py", f"checkpoint={run}", "mode=score", "input=lines.txt")
    model = lm.load(run)
    for line, text in zip(done.stdout.splitlines(), texts, strict=True):
        assert float(line.split("\t")[0]) == pytest.approx(model.score(text).log_prob, abs=1e-4)
