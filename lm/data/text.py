"""Your own text: `train.txt`, `valid.txt` and `test.txt`, one sentence a line, words between spaces."""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from lm.config import TextConfig
from lm.data.corpus import FORMAT, SPLITS
from lm.data.encode import read_twice
from lm.data.tokenize import read_text_split, rule_of
from lm.data.write import Recipe
from lm.errors import UserError
from lm.files import write_whole


def recipe(config: TextConfig) -> Recipe:
    folder = text_folder(config.dir)
    files = {split: folder / f"{split}.txt" for split in SPLITS}
    if missing := [f"{split}.txt" for split in SPLITS if not files[split].is_file()]:
        raise UserError(
            f"data.dir must hold train.txt, valid.txt and test.txt; {str(folder)!r} has no {', '.join(missing)}. "
            "Put it there, or name another folder with data.dir=PATH"
        )
    rule = rule_of(config)

    def sentences(split: str) -> Iterator[list[str]]:
        return read_text_split(files[split], rule=rule)

    return Recipe(
        folder=f"text-{_safe_name(folder)}-{_content_hash(config, files=files)[:8]}",
        meta={
            "name": config.name,
            "source": f"the text files of {str(folder)!r}",
            "rule": {"min_count": config.min_count, "tokens": rule.pattern, "lowercase": config.lowercase},
        },
        read=lambda: read_twice(sentences, min_count=config.min_count),
    )


def text_folder(name: str | None) -> Path:
    """The folder of a `data.dir`, checked to be one that can be listed."""
    folder = Path(name or "").absolute()
    try:
        if not name:
            raise FileNotFoundError
        next(folder.iterdir(), None)
    except FileNotFoundError:
        reason = "which does not exist"
    except NotADirectoryError:
        reason = "which is not a folder"
    except (OSError, ValueError) as error:
        reason = f"which cannot be read ({getattr(error, 'strerror', None) or error})"
    else:
        return folder
    raise UserError(
        f"data.dir must name a folder with train.txt, valid.txt and test.txt; got {name!r}, {reason}. Try data.dir=PATH"
    )


def _safe_name(folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", folder.name)[:60] or "folder"


def _content_hash(config: TextConfig, *, files: dict[str, Path]) -> str:
    """One hash of the text and of the rule: it names the prepared corpus."""
    root = Path(config.root)
    hashes = [_file_hash(files[split], index=root / ".text-hashes.json") for split in SPLITS]
    identity = [FORMAT, config.min_count, config.lowercase, hashes]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _file_hash(path: Path, *, index: Path) -> str:
    """sha256 of a file, remembered by path, size and time of change, so that gigabytes are hashed once."""
    try:
        known = json.loads(index.read_bytes())
        known = known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        known = {}
    try:
        stat = path.stat()
        key = json.dumps([str(path), stat.st_size, stat.st_mtime_ns])
        if isinstance(found := known.get(key), str):
            return found
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}. Check its permissions") from None
    # A file changed this very moment may change again without its time showing it.
    if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
        _remember(index, {**known, key: digest})
    return digest


def _remember(index: Path, known: dict[str, str]) -> None:
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        write_whole(index, lambda file: file.write(json.dumps(known, indent=2).encode()))
    except OSError:
        pass  # It only saves time: a read-only root still serves what it holds.
