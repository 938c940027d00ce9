"""A corpus is written whole or not at all: when killed, when two do it at once, when the disk refuses."""

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lm.data.corpora.text import TextConfig
from lm.data.corpora.zipf import ZipfConfig
from lm.data.corpus import Corpus
from lm.data.opening import open_corpus
from lm.data.text.vocabulary import Vocabulary
from lm.data.write import Block, Content, Recipe, write_corpus
from lm.system.errors import UserError

CHILD = """
import sys
from lm.data.corpora.zipf import ZipfConfig
from lm.data.opening import open_corpus
open_corpus(ZipfConfig("zipf", sys.argv[1], 5000, 1_000_000, 1))
"""


def start_child(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(root)], stdout=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_corpus(ZipfConfig("zipf", str(tmp_path_factory.mktemp("root")), 5000, 1_000_000, 1))


@pytest.mark.parametrize("moment", [".", "prepared/train.bin", "prepared/valid.bin"])
def test_killed_while_writing_then_again_gives_the_same_bytes(tmp_path: Path, undisturbed: Corpus, moment: str) -> None:
    building = tmp_path / f".{undisturbed.path.name}.building"
    while True:
        child = start_child(tmp_path)
        while not (building / moment).exists() and child.poll() is None:
            time.sleep(0.001)
        child.kill()
        child.communicate()
        if not (tmp_path / undisturbed.path.name).exists():
            break
        shutil.rmtree(tmp_path / undisturbed.path.name)  # it was done before the kill came; try again
    assert child.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [building.name]
    again = open_corpus(ZipfConfig("zipf", str(tmp_path), 5000, 1_000_000, 1))
    assert contents(again.path) == contents(undisturbed.path)
    assert list(tmp_path.iterdir()) == [again.path]


TEXT_CHILD = """
import sys
from lm.data.corpora.text import TextConfig
from lm.data import encode
from lm.data.opening import open_corpus
encode.SMALL = 0  # the scanner, although the text is small
open_corpus(TextConfig("text", sys.argv[1], 2, dir=sys.argv[2], lowercase=False))
"""


@pytest.mark.slow
def test_text_killed_at_random_moments_then_again_gives_the_same_bytes(
    tmp_path: Path, text_folder: Callable[..., TextConfig]
) -> None:
    text = " ".join(f"word{number % 5003}" for number in range(400_000)) + "\n"
    config = text_folder(train=text)

    def start(root: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", TEXT_CHILD, str(root), str(config.dir)])

    began = time.monotonic()
    assert start(tmp_path / "undisturbed").wait() == 0
    seconds = time.monotonic() - began
    root = tmp_path / "killed"
    for share in sorted(random.Random(5).uniform(0.3, 1) for _ in range(4)):
        child = start(root)
        time.sleep(share * seconds)
        child.kill()
        child.wait()
    assert start(root).wait() == 0
    (expected,) = (tmp_path / "undisturbed").glob("text-*")
    assert contents(root / expected.name) == contents(expected)
    assert sorted(path.name for path in root.iterdir() if path.name != ".text-hashes.json") == [expected.name]


def test_a_disk_that_fills_up_while_text_is_read_is_told_and_leaves_nothing(
    tmp_path: Path, text_folder: Callable[..., TextConfig]
) -> None:
    """A limit on the size of files stands in for the disk."""
    config = text_folder(train="a b c d e f\n" * 50_000)
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    command = [sys.executable, "-c", limit + TEXT_CHILD, str(tmp_path / "root"), str(config.dir)]
    child = subprocess.run(command, capture_output=True, text=True)
    assert "UserError: cannot prepare" in child.stderr and "File too large" in child.stderr
    assert [path for path in (tmp_path / "root").iterdir() if path.name != ".text-hashes.json"] == []


def test_several_processes_at_once_make_one_corpus(tmp_path: Path, undisturbed: Corpus) -> None:
    children = [start_child(tmp_path) for _ in range(3)]
    output = "".join(child.communicate()[0] for child in children)
    assert [child.returncode for child in children] == [0, 0, 0]
    assert output.count("preparing '") == 1
    assert contents(tmp_path / undisturbed.path.name) == contents(undisturbed.path)
    assert [path.name for path in tmp_path.iterdir()] == [undisturbed.path.name]


def test_leftovers_of_other_corpora_are_removed_too(tmp_path: Path, text_folder: Callable[..., TextConfig]) -> None:
    leftover = tmp_path / "root" / ".text8-min11.building"
    leftover.mkdir(parents=True)
    (leftover / "train.bin").write_bytes(b"half")
    open_corpus(text_folder())
    assert not leftover.exists()


def block(*ids: int) -> Block:
    return Block(np.array(ids), words=len(ids), characters=2 * len(ids), size=2 * len(ids))


def recipe(*, train: list[int], valid: Callable[[], Iterator[Block]]) -> Recipe:
    vocabulary = Vocabulary(("a", "</s>", "<unk>"), np.array([2, 1, 0]))
    splits = {"train": [block(*train)], "valid": valid(), "test": [block(0)]}
    return Recipe("x", {"name": "x", "source": "a test", "rule": {}}, lambda _: Content(vocabulary, splits))


def one_block() -> Iterator[Block]:
    yield block(0, 1)


def write(path: Path, **parts: object) -> None:
    write_corpus(path, recipe=recipe(**{"train": [0, 0, 1], "valid": one_block} | parts), notice=lambda _: None)  # type: ignore[arg-type]


def test_the_recipe_of_these_tests_is_sound(tmp_path: Path) -> None:
    write(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert Corpus.open(tmp_path / "x").split("train").tolist() == [0, 0, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_source_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted() -> Iterator[Block]:
        yield block(0, 1)
        raise error

    with pytest.raises(error):
        write(tmp_path / "x", valid=interrupted)
    assert list(tmp_path.iterdir()) == []


def test_text_that_changes_between_the_passes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="changed while it was read"):
        write(tmp_path / "x", train=[0, 0, 0])
    assert list(tmp_path.iterdir()) == []


def test_a_split_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the valid split must hold at least one word"):
        write(tmp_path / "x", valid=lambda: iter([]))
    assert list(tmp_path.iterdir()) == []


def test_what_another_process_finished_meanwhile_stands(tmp_path: Path) -> None:
    write(tmp_path / "x")
    before = contents(tmp_path / "x")
    write(tmp_path / "x", train=[1, 1, 1])
    assert contents(tmp_path / "x") == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_root_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file\x1b").write_text("")
    with pytest.raises(UserError, match=r"cannot prepare '.*file\\x1b/x': .*data\.root=PATH"):
        write(tmp_path / "file\x1b" / "x")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    def full() -> Iterator[Block]:
        yield block(0, 1)
        with open("/dev/full", "wb", buffering=0) as file:  # noqa: PTH123
            file.write(b"x")

    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(UserError, match=r"cannot prepare .*No space left on device.*data\.root=PATH"):
        write(tmp_path / "x", valid=full)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_gone_is_not_called_a_full_disk(tmp_path: Path) -> None:
    def gone(_: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        write_corpus(tmp_path / "x", recipe=recipe(train=[0, 0, 1], valid=one_block), notice=gone)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_foreign_folder_in_the_way_is_kept_and_told(undisturbed: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / undisturbed.path.name
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="Move that folder away"):
        open_corpus(ZipfConfig("zipf", str(tmp_path), 5000, 1_000_000, 1))
    assert (folder / "precious.txt").read_text() == "mine"


def test_a_read_only_copy_serves(undisturbed: Corpus, tmp_path: Path) -> None:
    shutil.copytree(undisturbed.path, tmp_path / undisturbed.path.name)
    tmp_path.chmod(0o500)
    try:
        opened = open_corpus(ZipfConfig("zipf", str(tmp_path), 5000, 1_000_000, 1))
        assert opened.vocabulary.hash == undisturbed.vocabulary.hash
    finally:
        tmp_path.chmod(0o700)
