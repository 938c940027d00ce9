"""A byte flipped on disk is detected, or changes neither metrics nor later steps."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lm.data.corpus import Corpus
from lm.inference.open_model import open_model
from lm.system import checkpoint
from lm.system.errors import UserError
from tests.conftest import run_command


@pytest.fixture
def place(tiny_run: Path) -> Path:
    """The folder of a run and its corpus."""
    return tiny_run.parent


def flips(path: Path, number: int) -> Iterator[tuple[int, int]]:
    """Draw positions and bits to flip; half of them are in the archive's directory at the end of the file."""
    chance, size = random.Random(number), path.stat().st_size
    for i in range(number):
        yield (chance.randrange(size) if i % 2 else chance.randrange(size * 3 // 4, size)), chance.randrange(8)


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b or (a != a and b != b)


def test_flipped_checkpoint_bytes(place: Path, tmp_path: Path) -> None:
    whole, bad = place / "run/checkpoints/last.pt", tmp_path / "bad.pt"
    good, noticed = checkpoint.load(whole), 0
    for where, bit in flips(whole, 40):
        shutil.copyfile(whole, bad)
        flip(bad, where, bit)
        try:
            found = checkpoint.load(bad)
        except UserError as error:
            noticed += 1
            assert str(bad) in str(error) and "\n" not in str(error)
        else:
            assert equal(found, good), f"bit {bit} of byte {where} has changed the content"
    assert noticed > 10


def test_damaged_tensors_are_named(place: Path, tmp_path: Path) -> None:
    """A changed weight in last.pt or best.pt is one sentence; `verify=false` skips the check."""
    shutil.copytree(place / "run", tmp_path / "run")
    for name in ("last", "best"):
        file = tmp_path / f"run/checkpoints/{name}.pt"
        weight = next(iter(checkpoint.load(file)["model"].values())).numpy().tobytes()
        flip(file, file.read_bytes().index(weight) + 5, 3)
        command = ["evaluate.py", f"checkpoint={tmp_path / 'run'}", f"which={name}", f"json={tmp_path}/x.json"]
        damaged = run_command(place, *command, check=2)
        assert f"{name}.pt cannot be read as a checkpoint (checksum mismatch" in damaged.stderr
        done = run_command(place, *command, "verify=false")
        assert "perplexity" in done.stdout


def test_flipped_corpus_bytes(place: Path, tmp_path: Path) -> None:
    (meta,) = (place / "data").glob("*/meta.json")
    whole = meta.parent
    good, noticed = Corpus.open(whole), 0
    chance = random.Random(1)
    files = sorted(path.name for path in whole.iterdir())
    for number in range(20):
        bad = tmp_path / str(number)
        shutil.copytree(whole, bad)
        file = bad / files[number % len(files)]
        flip(file, chance.randrange(file.stat().st_size), chance.randrange(8))
        try:
            found = Corpus.open(bad)
            texts = {split: found.text(split) for split in ("train", "valid", "test")}
        except UserError as error:
            noticed += 1
            assert str(bad) in str(error)
        else:
            assert found.vocabulary.hash == good.vocabulary.hash
            assert {**found.meta, "checksum": 0} == {**good.meta, "checksum": 0}
            assert all((texts[split].tokens == good.split(split)).all() for split in texts)
    assert noticed >= 15
    flip(tmp_path / "0" / "train.bin", 7, 0)
    Corpus.open(tmp_path / "1", verify=False).split("test")


def test_changed_vocabulary_with_valid_checksum_raises(place: Path, tmp_path: Path) -> None:
    content = checkpoint.load(place / "run/checkpoints/last.pt")
    words = content["vocabulary"]["files"]["vocab.tsv"].clone()
    words[words.tolist().index(ord("w"))] = ord("v")
    content["vocabulary"]["files"]["vocab.tsv"] = words
    del content["format"]
    checkpoint.save(content, tmp_path / "changed.pt")
    with pytest.raises(UserError, match="vocabulary hash mismatch"):
        open_model(str(tmp_path / "changed.pt"), device="cpu")


@pytest.mark.parametrize("key", ["root", "url"])
def test_checkpoint_cannot_redirect_writes_or_downloads(place: Path, tmp_path: Path, key: str) -> None:
    content = checkpoint.load(place / "run/checkpoints/last.pt")
    elsewhere = tmp_path / "elsewhere"
    if key == "root":
        data = {**content["config"]["data"], "root": str(elsewhere)}
    else:
        data = {"name": "text8", "root": "data", "min_count": 11, "url": "http://127.0.0.1:9/x.zip"}
    content = {**content, "config": {**content["config"], "data": data}}
    del content["format"]
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    checkpoint.save(content, tmp_path / "run/checkpoints/last.pt")
    for command in (["evaluate.py", "checkpoint=run"], ["train.py", "resume=run", "trainer.max_steps=50"]):
        done = run_command(tmp_path, *command, check=2)
        assert "a checkpoint must not choose where to write or what to download" in done.stderr
    assert not elsewhere.exists() and not (tmp_path / "data").exists()
    assert json.dumps(data) in json.dumps(checkpoint.load(tmp_path / "run/checkpoints/last.pt")["config"])
