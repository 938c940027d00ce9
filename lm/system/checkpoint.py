"""Checkpoints: written whole or not at all, loaded without running code, checked before anything is allocated.

A checkpoint is self-contained: settings, vocabulary, weights, optimizer, stream position, hidden state, clocks. It
holds tensors and plain values only, so `weights_only=True` loads it, and opening somebody else's can run nothing.
"""

import pickle
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lm.system.console import Progress, printable
from lm.system.errors import UserError, is_shortage
from lm.system.files import put_in_place, write_beside

FORMAT = 1
LAST, BEST = "last.pt", "best.pt"
COUNTED = ("config", "vocabulary", "corpus", "model")
KEYS = {
    "neural": (*COUNTED, "optimizer", "state", "loss_sum", "progress", "metrics_position"),
    "ngram": COUNTED,
    "mixture": ("config", "vocabulary", "corpus", "members"),
}
"""What a checkpoint of each kind holds; one that does not tell its kind is neural."""


def save(content: dict[str, Any], path: Path, *, also: Path | None = None) -> None:
    """Write a checkpoint; `also` gets the same one, as a second name for the same file where the disk can do that.

    The second name comes first: after a crash in between, a resume writes both again.
    """
    try:
        partial = write_beside(path, lambda file: torch.save({"format": FORMAT, **content}, file))
        if also is not None:
            share(partial, also)
        put_in_place(partial, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        if is_shortage(error):
            raise
        reason = (isinstance(error, OSError) and error.strerror) or f"is the disk full? torch says {str(error)[:150]!r}"
        raise UserError(
            f"The checkpoint {path} cannot be written: {reason}. The one before it is kept; free some space and go on "
            "with resume=auto."
        ) from None


def share(file: Path, other: Path) -> None:
    """Give a checkpoint a second name. Checkpoints are replaced, never changed, so both can share one file."""
    if other.exists() and other.samefile(file):
        return  # renaming one name of a file to another of its names would leave both
    partial = other.with_name(f".{other.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        partial.hardlink_to(file.resolve())  # of a symbolic link, what it names
    except OSError:  # a disk without links
        partial = write_beside(other, lambda copy: copy.write(file.read_bytes()))
    put_in_place(partial, other)


def find(path: str, *, name: str = LAST) -> Path:
    """The checkpoint file meant by a run directory, which has several, or by a file."""
    given = Path(path)
    file = given / "checkpoints" / name if given.is_dir() else given
    if not file.is_file():
        what = f"holds no checkpoints/{name}" if given.is_dir() else "does not exist"
        raise UserError(f"{path} {what}: a run directory (runs/NAME) or a checkpoint file is needed.")
    return file


def load(path: Path, *, trained: bool = False, verify: bool = True) -> dict[str, Any]:
    """The content of a checkpoint, its tensors mapped from the file.

    With `trained`, only of a kind whose training can go on. Without `verify`, checksums are not compared, and tensors
    are not read before they are used.
    """
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        if not zipfile.is_zipfile(path):  # torch would speak of its own options instead
            raise ValueError("it is not an archive as PyTorch writes it")
        if verify:
            _check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file can fail anywhere in torch's reader
        reason = _in_short(error)
        raise UserError(
            f"{path} cannot be read as a checkpoint ({reason[:150]}). It may be truncated or written by another "
            f"program; a run keeps a second one in checkpoints/{BEST}."
        ) from None
    if not isinstance(content, dict) or not {"format", "config"} <= content.keys():
        raise UserError(f"{path} is a PyTorch file but not a checkpoint of this program.")
    if content["format"] != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {content['format']}; this version reads format {FORMAT}. "
            "Load it with the version that wrote it."
        )
    kind = content.get("kind", "neural")
    if kind not in KEYS or (trained and kind != "neural"):
        raise UserError(f"{path} is of kind {str(kind)[:20]!r}, which cannot be {'trained' if trained else 'read'}.")
    missing = [key for key in KEYS[kind] if key not in content]
    if missing:
        raise UserError(f"{path} is damaged: it lacks {', '.join(missing)}. Another one is in checkpoints/{BEST}.")
    return content


def _in_short(error: Exception) -> str:
    """What is the matter with a file; torch's own words are advice to load it unsafely, with escape codes."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds objects, which could run code; only tensors and plain values are read"
    if isinstance(error, zipfile.BadZipFile) and "CRC" in str(error):
        return "its checksum is wrong: bytes have changed since it was written"
    return printable(str(error).splitlines()[0] if str(error) else type(error).__name__)


def _check_sums(path: Path) -> None:
    """Compare every part of the file with the checksum that the archive's index keeps of it."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        total = sum(part.file_size for part in parts)
        with Progress(total, label=f"checking {path.name}", unit="B", to=sys.stderr) as bar:
            for part in parts:
                if part.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"its part {part.filename} is compressed")
                with archive.open(part) as file:
                    while block := file.read(1 << 22):
                        bar.advance(len(block))


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Report whatever fails while a checkpoint's content is used as what it is: a damaged file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise UserError(
            f"{path} is damaged: its content does not fit together ({type(error).__name__}). "
            f"A run keeps a second checkpoint in checkpoints/{BEST}."
        ) from error


def check_shapes(weights: dict[str, Tensor], model: nn.Module, *, path: Path) -> None:
    """Refuse weights that do not fit; `model` may be on the meta device, so that nothing has been allocated yet."""
    expected = {name: _form(value) for name, value in model.state_dict().items()}
    found = {name: _form(value) for name, value in weights.items()}
    wrong = [
        f"{name}: {found.get(name, 'missing')} in the file, {expected.get(name, 'unknown')} by its settings"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    _refuse(wrong, path=path)


def check_state(own: Any, saved: Any, *, path: Path, place: str = "") -> None:
    """Refuse optimizer or hidden state whose form is not that of `own`; copying would stretch a wrong one silently."""
    wrong: list[str] = []
    if isinstance(own, Tensor):
        if not isinstance(saved, Tensor) or _form(own) != _form(saved):
            wrong = [f"{place}: not {_form(own)}"]
    elif isinstance(own, int | float):
        if not isinstance(saved, int | float):
            wrong = [f"{place}: not a number"]
    elif isinstance(own, dict):
        if not isinstance(saved, dict) or own.keys() != saved.keys():
            wrong = [f"{place}: other entries than {sorted(map(str, own))}"]
    elif isinstance(own, list | tuple) and (not isinstance(saved, list | tuple) or len(own) != len(saved)):
        wrong = [f"{place}: not {len(own)} entries"]
    _refuse(wrong, path=path)
    for key, item in own.items() if isinstance(own, dict) else enumerate(own) if isinstance(own, list | tuple) else ():
        check_state(item, saved[key], path=path, place=f"{place}.{key}")


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _refuse(wrong: list[str], *, path: Path) -> None:
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{path} does not fit the settings it carries: {'; '.join(wrong[:3])}{more}.")
