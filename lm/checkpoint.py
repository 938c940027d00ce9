"""Checkpoints: written whole or not at all, loaded without running code, checked before anything is allocated.

A checkpoint is self-contained: settings, vocabulary, weights, optimizer, stream position, hidden state, clocks. It
holds tensors and plain values only, so `weights_only=True` loads it, and opening somebody else's can run nothing.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lm.errors import UserError
from lm.files import sync_folder, write_whole

FORMAT = 1
LAST, BEST = "last.pt", "best.pt"


def save(content: dict[str, Any], path: Path, *, also: Path | None = None) -> None:
    """Write a checkpoint; `also` gets the same one, as a second name for the same file where the disk can do that."""
    write_whole(path, lambda file: torch.save({"format": FORMAT, **content}, file))
    if also is not None:
        link = also.with_name(f".{also.name}.partial")
        link.unlink(missing_ok=True)
        try:
            # Checkpoints are replaced, never changed, so both names can share one file.
            link.hardlink_to(path)
        except OSError:
            write_whole(also, lambda file: file.write(path.read_bytes()))
            return
        link.replace(also)
        sync_folder(also.parent)


def find(path: str) -> Path:
    """The checkpoint file meant by a run directory or a file."""
    given = Path(path)
    file = given / "checkpoints" / LAST if given.is_dir() else given
    if not file.is_file():
        what = f"holds no checkpoints/{LAST}" if given.is_dir() else "does not exist"
        raise UserError(f"{path} {what}: a run directory (runs/NAME) or a checkpoint file is needed.")
    return file


def load(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, its tensors mapped from the file and not yet read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} cannot be read as a checkpoint ({reason[:150]}). It may be truncated or of another program; "
            f"a run keeps a second one in checkpoints/{BEST}."
        ) from None
    if not isinstance(content, dict) or "format" not in content or "config" not in content:
        raise UserError(f"{path} is a PyTorch file but not a checkpoint of this program.")
    if content["format"] != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {content['format']}; this version reads format {FORMAT}. "
            "Load it with the version that wrote it."
        )
    return content


def check_shapes(weights: dict[str, Tensor], model: nn.Module, *, path: Path) -> None:
    """Refuse weights that do not fit; `model` may be on the meta device, so that nothing has been allocated yet."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = [
        f"{name}: {found.get(name, 'missing')} in the file, {expected.get(name, 'unknown')} by its settings"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{path} does not fit the settings it carries: {'; '.join(wrong[:3])}{more}.")


def modified(path: Path) -> float:
    """When the checkpoint was written; for telling which run is the newest."""
    return path.stat().st_mtime
