"""Open text as people store it: plain, JSON Lines or Parquet, each also compressed, or the .txt members of a .zip.

Every record of a .jsonl or .parquet file has a text field, which is cut into lines like a file; its end ends a line.
"""

import bz2
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from lm.data.source import TextFile, decode, explain_damage, read_lines
from lm.system.console import Progress
from lm.system.errors import UserError

COMPRESSIONS: dict[str, tuple[bytes, Callable[[], Any]]] = {
    ".gz": (b"\x1f\x8b", lambda: zlib.decompressobj(wbits=31)),
    ".bz2": (b"BZh", bz2.BZ2Decompressor),
    ".xz": (b"\xfd7zXZ", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
    ".zst": (
        b"(\xb5/\xfd",
        lambda: _optional("zstandard", for_files=".zst").ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
    ),
}
"""By file ending: the first bytes of a stream, and a maker of decompressors; each decompresses one stream."""
RECORDS = (".jsonl", ".ndjson", ".parquet")
ENDINGS = (*(form + end for form in (".txt", *RECORDS) for end in ("", *COMPRESSIONS)), ".zip")
"""Recognized file endings. Files with other endings are read as plain text, except `NOT_TEXT`."""
NOT_TEXT = (".json", ".csv", ".tsv")
ENDINGS_TEXT = ".txt, .jsonl or .parquet (also with .gz, .bz2, .xz or .zst), .zip"


def text_files(path: Path, *, field: str = "text", errors: str = "strict") -> list[TextFile]:
    """Return the text of a file by its ending; a .zip has several, in alphabetical order.

    `field` is the text field of records; `errors` is the handling of invalid UTF-8.
    """
    name, stem = str(path), path
    if path.suffix == ".zip":
        with explain_damage(name):
            archive = zipfile.ZipFile(path)  # closed with the last member opened from it
        # macOS adds a file of attributes for each file.
        infos = [info for info in archive.infolist() if re.fullmatch(r"(?!__MACOSX/).*\.txt", info.filename)]
        infos.sort(key=lambda info: info.filename)
        if not infos:
            raise UserError(f"{name!r} must contain .txt files; it contains none. Add some, or unpack it.")
        return [TextFile(f"{path}/{info.filename}", partial(archive.open, info), info.file_size) for info in infos]
    file = TextFile.plain(path)
    if path.suffix in COMPRESSIONS:
        file, stem = TextFile(name, partial(open_compressed, path, path.suffix)), path.with_suffix("")
    if stem.suffix in NOT_TEXT:
        raise UserError(
            f"{name!r} must be {ENDINGS_TEXT}; got {stem.suffix}. Convert it to .jsonl, with an object on each line "
            "and the text in the field that data.field names."
        )
    if stem.suffix in RECORDS:
        read = parquet_texts if stem.suffix == ".parquet" else partial(_json_texts, errors=errors)
        return [TextFile(name, lambda: _stream(map(_lines, read(file.open, name, field))))]
    return [file]


def hold_out(
    texts: Sequence[TextFile], splits: Sequence[str], share: float, folder: Path, *, errors: str
) -> dict[str, Sequence[TextFile]]:
    """Copy the lines to a file in `folder` for each of `splits`, which get this share each, and for train.

    The hash of a line decides, so equal lines stay together. Blank lines follow the line before them.
    """
    targets, filled = [*splits, "train"], set[str]()
    with ExitStack() as stack:
        files = {target: stack.enter_context((folder / f"{target}.txt").open("wb")) for target in targets}
        progress = stack.enter_context(Progress(None, label="holding out lines", unit="B"))
        for text in texts:
            offset, target = 0, targets[0]
            with explain_damage(text.name), text.open() as file:
                for line in file:
                    if content := line.strip():
                        number = int(zlib.crc32(content) / 2**32 / share)
                        target = targets[min(number, len(splits))]
                        filled.add(target)
                    files[target].write(_lines(decode(line, errors=errors, name=text.name, offset=offset)))
                    offset += len(line)
                    progress.advance(len(line))
    for target in targets:
        if target not in filled:
            raise UserError(
                f"data.holdout must leave lines for every split; {share} of these training lines leaves none for "
                f"{target}. Try data.holdout=0.2, or data.{target}=FILE."
            )
    return {
        target: [TextFile.plain(folder / f"{target}.txt", f"the lines held out for {target}")] for target in targets
    }


# ---- records -----------------------------------------------------------------------------------------------------


def parquet_texts(open_bytes: Callable[[], IO[bytes]], name: str, field: str) -> Iterator[str]:
    """Yield the texts of a column."""
    parquet = _optional("pyarrow.parquet", for_files=".parquet")
    with open_bytes() as file:
        try:
            table = parquet.ParquetFile(file if file.seekable() else io.BytesIO(file.read()))
            if field not in (columns := table.schema_arrow.names):
                raise _no_text(name, field, f"the file has none (fields: {', '.join(columns) or 'none'})")
            batches = table.iter_batches(batch_size=1000, columns=[field])
            for row, text in enumerate((text for batch in batches for text in batch.column(0).to_pylist()), 1):
                if not isinstance(text, str):
                    raise _no_text(name, field, f"row {row} has {text!r:.40}")
                yield text
        except (OSError, ValueError) as error:  # pyarrow's errors
            raise EOFError(str(error)) from None


def _json_texts(open_bytes: Callable[[], IO[bytes]], name: str, field: str, *, errors: str) -> Iterator[str]:
    with open_bytes() as file:
        for number, line in enumerate(read_lines(file, name=name, errors=errors), 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise _no_text(name, field, f"line {number} is not a JSON object")
            if field not in record:
                raise _no_text(name, field, f"line {number} has none (fields: {', '.join(record) or 'none'})")
            if not isinstance(record[field], str):
                raise _no_text(name, field, f"line {number} has {json.dumps(record[field]):.40}")
            yield record[field]


def _no_text(name: str, field: str, got: str) -> UserError:
    return UserError(f"Every record of {name!r} must have a text in the field {field!r}; {got}. Try data.field=NAME.")


def _lines(text: str) -> bytes:
    """Encode a text whose end also ends a line; lone surrogates, as in JSON, become invalid UTF-8."""
    return (text if text.endswith("\n") else text + "\n").encode(errors="surrogatepass")


# ---- bytes -------------------------------------------------------------------------------------------------------


def open_compressed(path: Path, ending: str | None = None) -> IO[bytes]:
    """Open a file compressed as its ending says, or by default as its first bytes say, if they do."""
    with path.open("rb") as file:
        head = file.read(8)
    ending = ending or next((end for end, (magic, _) in COMPRESSIONS.items() if head.startswith(magic)), None)
    return _stream(_decompress(path, COMPRESSIONS[ending][1])) if ending else path.open("rb")


def _decompress(path: Path, new: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress all streams of a file. The standard library's readers ignore a damaged second stream."""
    stream, data = new(), b""
    with path.open("rb") as file:
        while data := data or file.read(1 << 14):
            if stream.eof:
                if not (data := data.lstrip(b"\0")):  # padding between streams
                    continue
                stream = new()
            try:
                yield stream.decompress(data)
            except Exception as error:  # each library raises its own
                raise EOFError(str(error)) from None
            data = stream.unused_data if stream.eof else b""
    if not stream.eof:
        raise EOFError("it ends early")


def _stream(blocks: Iterator[bytes]) -> IO[bytes]:
    """Read an iterator of bytes like a file."""
    return io.BufferedReader(_Blocks(blocks), 1 << 18)


class _Blocks(io.RawIOBase):
    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            if (block := next(self._blocks, None)) is None:
                return 0
            self._rest = memoryview(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _optional(module: str, *, for_files: str) -> Any:
    """Import a module of the extra `formats`."""
    try:
        return import_module(module)
    except ImportError:
        package, _, _ = module.partition(".")
        raise UserError(f"Reading {for_files} files needs the package {package}. Try pip install {package}.") from None
