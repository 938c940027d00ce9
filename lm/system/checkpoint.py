"""Checkpoint files: written atomically, loaded without executing code, checked before memory is allocated.

A checkpoint is self-contained: settings, vocabulary, weights, optimizer, stream position, hidden state, clocks. It
contains only tensors and plain values, so it loads with `weights_only=True` and cannot execute code.
"""

import difflib
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
MODEL_KEYS = ("config", "vocabulary", "corpus", "model")
KEYS = {
    "neural": (*MODEL_KEYS, "optimizer", "state", "loss_sum", "progress", "metrics_position"),
    "ngram": MODEL_KEYS,
    "mixture": ("config", "vocabulary", "corpus", "members"),
}
"""Entries of a checkpoint by kind; a checkpoint without a kind is neural."""


def save(content: dict[str, Any], path: Path, *, also: Path | None = None) -> None:
    """Write a checkpoint; `also` is a hard link to the same file, or a copy if the disk has no hard links.

    The link is created first: after a crash in between, a resumed run writes both again.
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
        advice = "The one before it is kept; free some space, then continue with resume=auto."
        raise UserError(
            f"The checkpoint {path} cannot be written: {reason}. "
            + (advice if path.exists() else "There is none before it. Free some space and start again.")
        ) from None


def share(file: Path, other: Path) -> None:
    """Hard-link a checkpoint file. Checkpoints are replaced, never modified, so both names can share the file."""
    if other.exists() and other.samefile(file):
        return  # rename() between hard links of one file does nothing
    partial = other.with_name(f".{other.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        partial.hardlink_to(file.resolve())  # the target of a symbolic link
    except OSError:  # a disk without links
        partial = write_beside(other, lambda copy: copy.write(file.read_bytes()))
    put_in_place(partial, other)


def find(path: str, *, name: str = LAST) -> Path:
    """Return the checkpoint `name` of a run directory, or a checkpoint file itself."""
    given = Path(path)
    try:
        file = given / "checkpoints" / name if given.is_dir() else given
        found = file.is_file()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    if not found:
        what = f"holds no checkpoints/{name}" if given.is_dir() else "does not exist"
        near = [] if given.is_dir() else difflib.get_close_matches(given.name, [f.name for f in given.parent.glob("*")])
        hint = f" Did you mean {given.with_name(near[0])}?" if near else ""
        raise UserError(f"{path} {what}: a run directory (runs/NAME) or a checkpoint file is needed.{hint}")
    return file


def load(path: Path, *, trained: bool = False, verify: bool = True) -> dict[str, Any]:
    """Load a checkpoint, with tensors mapped from the file.

    `trained` rejects kinds that cannot be trained further. Without `verify`, checksums are not compared, and tensors
    are read when they are used.
    """
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):  # torch's message would recommend its own options
                raise ValueError("it is not an archive as PyTorch writes it")
        if verify:
            _check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
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
    """Summarize the problem; torch's own message would advise loading the file unsafely."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds objects, which could execute code; only tensors and plain values are read"
    if isinstance(error, zipfile.BadZipFile) and "CRC" in str(error):
        return "checksum mismatch: bytes have changed since it was written"
    return printable(str(error).splitlines()[0] if str(error) else type(error).__name__)


def _check_sums(path: Path) -> None:
    """Compare every part of the archive with its checksum."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        total = sum(part.file_size for part in parts)
        with Progress(total, label=f"checking {path.name}", unit="B", to=sys.stderr) as bar:
            for part in parts:
                if part.compress_type != zipfile.ZIP_STORED:  # torch would map the compressed bytes
                    raise ValueError(f"its part {part.filename} is compressed")
                with archive.open(part) as file:
                    while block := file.read(1 << 22):
                        bar.advance(len(block))


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Convert any error while a checkpoint is restored into a UserError about a damaged file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise UserError(
            f"{path} is damaged: its content is inconsistent ({type(error).__name__}). "
            f"A run keeps a second checkpoint in checkpoints/{BEST}."
        ) from error


def check_shapes(weights: dict[str, Tensor], model: nn.Module, *, path: Path) -> None:
    """Raise UserError if weights do not match the model, which may be on the meta device, or are not finite."""
    expected, saved = _form(model.state_dict()), _form(weights)
    wrong = [
        f"{name}: {saved.get(name, 'missing')} in the file, {expected.get(name, 'unknown')} by its settings"
        for name in sorted(expected.keys() | saved.keys())
        if expected.get(name) != saved.get(name)
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{path} does not fit the settings it carries: {'; '.join(wrong[:3])}{more}.")
    if bad := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise UserError(f"{path} cannot be used: {', '.join(bad[:3])} must be finite; got NaN or infinite values.")


def check_state(expected: Any, saved: Any, *, path: Path, name: str) -> None:
    """Raise UserError if saved state has a different structure; copying would silently broadcast it."""
    if _form(expected) != _form(saved):
        raise UserError(f"{path} does not fit the settings it carries: its {name} has other entries or shapes.")


def _form(tree: Any) -> Any:
    """Return the structure of nested containers, with shapes and dtypes in place of tensors."""
    if isinstance(tree, dict):
        return {key: _form(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_form(item) for item in tree]
    if isinstance(tree, Tensor):
        kind = tree.dtype if tree.layout is torch.strided else f"{tree.dtype}, {tree.layout}"
        return f"{tuple(tree.shape)} of {str(kind).replace('torch.', '')}"
    return "number" if isinstance(tree, int | float) else type(tree).__name__
