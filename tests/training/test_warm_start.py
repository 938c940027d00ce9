"""Warm start: an identical model for identical vocabularies, otherwise weights copied word by word."""

from pathlib import Path

import pytest
import torch

from lm.inference.open_model import open_model
from tests.conftest import TINY, run_command

SMALL = [word for word in TINY if not word.startswith(("data", "output", "trainer.max_steps"))]
TEXT = [*SMALL, "data=text", "data.min_count=1", "trainer.batch_size=2"]
OTHER = {
    "one": "the cat sat on the mat\nthe dog ran to a cat\n",
    "two": "a bird sat on a dog\nthe owl ran to the cat\n",
}
KINDS = {
    "full": "output=full",
    "adaptive": "output=adaptive output.cutoffs=[4,8] output.head_bias=true",
    "adaptive input": "output=adaptive output.cutoffs=[4,8] input=adaptive",
    "dsoftmax": "output=dsoftmax_star output.cutoffs=[4,8]",
    "nce": "output=nce",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts that share some words."""
    folder = tmp_path_factory.mktemp("warm")
    for name, text in OTHER.items():
        (folder / name).mkdir()
        for split in ("train", "valid", "test"):
            (folder / name / f"{split}.txt").write_text(text * 12)
    return folder


def trained(place: Path, *words: str, steps: int, run: str, check: int = 0) -> str:
    done = run_command(place, "train.py", *TEXT, *words, f"trainer.max_steps={steps}", f"run_dir={run}", check=check)
    return done.stderr if check else done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_mapped_by_word(place: Path, kind: str) -> None:
    """After a step with a tiny learning rate, every vector is unchanged except those of new words."""
    settings, name = KINDS[kind].split(), kind.replace(" ", "-")
    trained(place, *settings, "data.dir=one", steps=6, run=f"{name}/one")
    still = ["optim.lr=1e-12", "seed=9", f"init={name}/one"]
    said = trained(place, *settings, "data.dir=two", *still, steps=1, run=f"{name}/two")
    assert "init     weights of step 6 of" in said and "initialized randomly" in said
    one, two = (open_model(str(place / name / run), device="cpu") for run in ("one", "two"))
    fresh = dict(zip(two.vocabulary.words, range(len(two.vocabulary)), strict=True))
    for word, row in fresh.items():
        vectors = [opened.model.input(torch.tensor([opened.vocabulary.ids.get(word, 0)])) for opened in (one, two)]
        before, now = one.vocabulary.ids.get(word), row
        moved = kind == "adaptive input" and before is not None and (before < 4, before < 8) != (now < 4, now < 8)
        same = torch.allclose(vectors[0], vectors[1], atol=1e-6)
        assert same == (word in one.vocabulary.ids and not moved), word
    for part in ("core.layers.0.weight_hh_l0", "core.layers.0.bias_hh_l0"):
        assert torch.allclose(one.model.get_parameter(part), two.model.get_parameter(part), atol=1e-6)


@pytest.mark.parametrize("output", ["output=full", "output=adaptive output.cost_model=flops", "output=hsm_freq"])
def test_warm_start_with_same_words_copies_model(place: Path, output: str) -> None:
    """For several layers, with the other run's clusters; training then continues with another learning rate."""
    name = output.partition(" ")[0].removeprefix("output=")
    trained(place, *output.split(), "data.dir=one", steps=6, run=f"same/{name}")
    trained(
        place, *output.split(), "data.dir=one", "optim.lr=1e-12", f"init=same/{name}", steps=1, run=f"same/{name}-2"
    )
    text = "the cat ran"
    one, two = (open_model(str(place / "same" / run), device="cpu") for run in (name, f"{name}-2"))
    ids = torch.tensor([one.vocabulary.encode(text.split()).tolist()]).T
    outputs = [m.model.read(ids, m.model.initial_state(1))[0].nll(ids) for m in (one, two)]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5)


def test_size_mismatch_raises(place: Path) -> None:
    trained(place, "output=full", "data.dir=one", steps=2, run="fit")
    for words, message in {
        "output=nce init=fit": "init=fit needs output=full, the kind of its weights; got output=nce",
        "output=full model.hidden_size=16 init=fit": "has other sizes: ",
        "output=full init=nowhere": "nowhere does not exist",
    }.items():
        assert message in trained(place, *words.split(), "data.dir=one", steps=2, run="bad", check=2)
    trained(place, "output=hsm_freq", "data.dir=one", steps=2, run="classes")
    said = trained(place, "output=hsm_freq", "data.dir=two", "init=classes", steps=2, run="bad", check=2)
    assert "cannot map weights" in said
    assert not (place / "bad").exists()


def test_warm_started_run_resumes_without_init(place: Path) -> None:
    trained(place, "output=full", "data.dir=one", steps=2, run="first")
    warm = ["output=full", "data.dir=one", "init=first"]
    trained(place, *warm, steps=2, run="second")
    (place / "first").rename(place / "gone")
    done = run_command(place, "train.py", "resume=second", "trainer.max_steps=4")
    assert "resumed  at step 2" in done.stdout
