"""Preparation is atomic: when killed, with concurrent processes, and on a full disk."""

import io
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from lm.data.corpora.text import TextConfig
from lm.data.corpora.zipf import ZipfConfig
from lm.data.corpus import Corpus, open_corpus
from lm.data.prepare import prepare
from lm.data.source import Source, TextFile
from lm.data.text.tokenize import WHITESPACE, TokenRule
from lm.system.errors import UserError


def zipf(root: Path) -> ZipfConfig:
    return ZipfConfig(root=str(root), vocab_size=5000, tokens=1_000_000)


CHILD = """
import sys
from lm.data.corpora.zipf import ZipfConfig
from lm.data.corpus import open_corpus
open_corpus(ZipfConfig(root=sys.argv[1], vocab_size=5000, tokens=1_000_000))
"""


def start_child(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(root)], stdout=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_corpus(zipf(tmp_path_factory.mktemp("root")))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "moment", [pytest.param(".", marks=SLOW), "prepared/train.bin", pytest.param("prepared/valid.bin", marks=SLOW)]
)
def test_killed_then_repeated_gives_the_same_bytes(tmp_path: Path, undisturbed: Corpus, moment: str) -> None:
    building = tmp_path / f".{undisturbed.path.name}.building"
    while True:
        child = start_child(tmp_path)
        while not (building / moment).exists() and child.poll() is None:
            time.sleep(0.001)
        child.kill()
        child.communicate()
        if not (tmp_path / undisturbed.path.name).exists():
            break
        shutil.rmtree(tmp_path / undisturbed.path.name)  # it had finished before the kill; try again
    assert child.returncode == -9
    assert building.exists()
    again = open_corpus(zipf(tmp_path))
    assert contents(again.path) == contents(undisturbed.path)
    assert list(tmp_path.iterdir()) == [again.path]


TEXT_CHILD = """
import sys
from lm.data.corpora.text import TextConfig
from lm.data.corpus import open_corpus
open_corpus(TextConfig(root=sys.argv[1], dir=sys.argv[2]))
"""


def test_disk_that_fills_up_is_an_error_and_nothing_is_left(
    tmp_path: Path, text_folder: Callable[..., TextConfig]
) -> None:
    """Simulates a full disk with a file-size limit."""
    config = text_folder(train="a b c d e f\n" * 50_000)
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    command = [sys.executable, "-c", limit + TEXT_CHILD, str(tmp_path / "root"), str(config.dir)]
    child = subprocess.run(command, capture_output=True, text=True)
    assert "UserError: Cannot prepare" in child.stderr and "File too large" in child.stderr
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.slow
def test_several_processes_write_one_corpus(tmp_path: Path, undisturbed: Corpus) -> None:
    children = [start_child(tmp_path) for _ in range(3)]
    output = "".join(child.communicate()[0] for child in children)
    assert [child.returncode for child in children] == [0, 0, 0]
    assert output.count("preparing '") == 1
    assert contents(tmp_path / undisturbed.path.name) == contents(undisturbed.path)
    assert [path.name for path in tmp_path.iterdir()] == [undisturbed.path.name]


def source(valid: Callable[[], bytes] = lambda: b"a\n") -> Source:
    def splits(_: Path) -> dict[str, list[TextFile]]:
        train, test = (TextFile(name, lambda: io.BytesIO(b"a a\n")) for name in ("train", "test"))
        return {"train": [train], "valid": [TextFile("valid", lambda: io.BytesIO(valid()))], "test": [test]}

    meta = {"name": "x", "source": "a test", "rule": {}}
    return Source("x", meta, splits, TokenRule(WHITESPACE))


def test_finished_corpus_is_not_written_again(tmp_path: Path) -> None:
    prepare(source(), tmp_path / "x")
    corpus = Corpus.open(tmp_path / "x")
    assert corpus.vocabulary.decode(corpus.split("train")) == ["a", "a", "</s>"]
    before = contents(tmp_path / "x")
    prepare(source(lambda: b"other\n"), tmp_path / "x")
    assert contents(tmp_path / "x") == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ZeroDivisionError(), ZeroDivisionError),
        (OSError(28, "full"), UserError),
    ],
)
def test_failed_preparation_leaves_nothing(
    tmp_path: Path, failure: BaseException, expected: type[BaseException]
) -> None:
    with pytest.raises(expected):
        prepare(source(mock.Mock(side_effect=failure)), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_root_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file\x1b").write_text("")
    with pytest.raises(UserError, match=r"'.*file\\x1b/x': .*data\.root=PATH"):
        prepare(source(), tmp_path / "file\x1b" / "x")


def test_closed_output_is_not_reported_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("lm.data.prepare.say", closed)
    with pytest.raises(BrokenPipeError):
        prepare(source(), tmp_path / "x")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_foreign_folder_is_kept(undisturbed: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / undisturbed.path.name
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="Move that folder away"):
        open_corpus(zipf(tmp_path))
    assert (folder / "precious.txt").read_text() == "mine"


def test_untrusted_settings_write_nothing_elsewhere(text_folder: Callable[..., TextConfig]) -> None:
    """Like a checkpoint with someone else's data.root."""
    config = text_folder()
    with pytest.raises(UserError, match=r"lm\.prepare data=text"):
        open_corpus(config, trusted=False)
    assert not Path(config.root).exists()
