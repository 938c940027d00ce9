"""Open text as people store it: plain, JSON Lines or Parquet, each also compressed, or the .txt members of a .zip.

Every record of a .jsonl or .parquet file has a text field, which is cut into lines like a file; its end ends a line.
"""

import bz2
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from lm.data.source import TextFile, decode, explain_damage, read_lines
from lm.system.errors import UserError

COMPRESSIONS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".zst": lambda: _optional("zstandard", for_files=".zst").ZstdDecompressor().decompressobj(),
}
"""Makers of decompressors by file ending; each decompresses one stream."""
ENDINGS = (*(form + end for form in (".txt", ".jsonl", ".parquet") for end in ("", *COMPRESSIONS)), ".zip")
"""File endings that are recognized; files with other endings are read as plain text."""
ENDINGS_TEXT = ".txt, .jsonl or .parquet (also with .gz, .bz2, .xz or .zst), .zip"


def text_files(path: Path, *, field: str = "text", errors: str = "strict") -> list[TextFile]:
    """Return the text of a file by its ending; a .zip has several, in alphabetical order.

    `field` is the text field of records; `errors` is the handling of invalid UTF-8.
    """
    name, stem = str(path), path
    if path.suffix == ".zip":
        with explain_damage(name):
            archive = zipfile.ZipFile(path)  # closed with the last member opened from it
        infos = [info for info in archive.infolist() if info.filename.endswith(".txt")]
        infos.sort(key=lambda info: info.filename)
        if not infos:
            raise UserError(f"{name!r} must contain .txt files; it contains none. Pack some, or unpack it.")
        return [TextFile(f"{path}/{info.filename}", partial(archive.open, info), info.file_size) for info in infos]
    plain = TextFile.plain(path)
    open_bytes = plain.open
    if path.suffix in COMPRESSIONS:
        open_bytes, stem = partial(_stream, partial(_decompress, path, COMPRESSIONS[path.suffix])), path.with_suffix("")
    match stem.suffix:
        case ".jsonl":
            return [TextFile(name, partial(_stream, lambda: _json_texts(open_bytes(), name, field, errors)))]
        case ".parquet":
            texts = partial(parquet_texts, open_bytes, name, field)
            return [TextFile(name, partial(_stream, lambda: map(_lines, texts())))]
    return [plain if stem is path else TextFile(name, open_bytes)]


def hold_out(text: TextFile, low: float, high: float, *, errors: str) -> TextFile:
    """Keep the lines whose hash, between 0 and 1, is in [low, high), and the blank lines after them.

    Equal lines are never separated.
    """

    def lines() -> Iterator[bytes]:
        with text.open() as file:
            offset, kept = 0, low == 0
            for line in file:
                if content := line.strip():
                    kept = low <= zlib.crc32(content) / 2**32 < high
                if kept:
                    yield _lines(decode(line, errors=errors, name=text.name, offset=offset))
                offset += len(line)

    return TextFile(text.name, partial(_stream, lines))


# ---- records -----------------------------------------------------------------------------------------------------


def parquet_texts(open_bytes: Callable[[], IO[bytes]], name: str, field: str) -> Iterator[str]:
    """Yield the texts of a column."""
    parquet = _optional("pyarrow.parquet", for_files=".parquet")
    with open_bytes() as file:
        try:
            table = parquet.ParquetFile(file if file.seekable() else io.BytesIO(file.read()))
            columns = dict.fromkeys(table.schema_arrow.names)
            if field not in columns:
                raise _no_text(name, field, "the file", columns)
            batches = table.iter_batches(batch_size=1000, columns=[field])
            for row, text in enumerate((text for batch in batches for text in batch.column(0).to_pylist()), 1):
                if not isinstance(text, str):
                    raise _no_text(name, field, f"row {row}", {})
                yield text
        except (OSError, ValueError) as error:  # pyarrow's errors
            raise EOFError(str(error)) from None


def _json_texts(file: IO[bytes], name: str, field: str, errors: str) -> Iterator[bytes]:
    with file:
        for number, line in enumerate(read_lines(file, name=name, errors=errors), 1):
            if not line.isspace():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                record = record if isinstance(record, dict) else {}
                if not isinstance(text := record.get(field), str):
                    raise _no_text(name, field, f"line {number}", record)
                yield _lines(text)


def _no_text(name: str, field: str, where: str, record: dict[str, Any]) -> UserError:
    fields = ", ".join(map(str, record)) if record else "none"
    return UserError(
        f"Every record of {name!r} must have a text in the field {field!r}; {where} has none (fields: {fields}). "
        "Try data.field=NAME."
    )


def _lines(text: str) -> bytes:
    """Encode a text whose end also ends a line; lone surrogates, as in JSON, become invalid UTF-8."""
    return (text if text.endswith("\n") else text + "\n").encode(errors="surrogatepass")


# ---- bytes -------------------------------------------------------------------------------------------------------


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


def _stream(blocks: Callable[[], Iterable[bytes]]) -> IO[bytes]:
    """Read an iterator of bytes like a file."""
    return io.BufferedReader(_Blocks(iter(blocks())), 1 << 18)


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
