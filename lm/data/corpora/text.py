"""Your own text: one sentence per line, words separated by whitespace.

`data.dir` is a folder with each split in one of these forms, or `data.train`, `data.valid` and `data.test` are patterns
of files, read in alphabetical order:

    train.txt   train.txt.gz   train.txt.xz   train.zip (its .txt members)   train/ (a folder of such files)
"""

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from lm.config.registry import plugin
from lm.config.rules import Count
from lm.data.settings import FileConfig
from lm.data.source import SPLITS, Source, files_tag, text_files, text_source
from lm.data.text.tokenize import WHITESPACE, TokenRule
from lm.system.errors import UserError

ENDINGS = (".txt", ".txt.gz", ".txt.xz", ".zip")

Files = dict[str, list[Path]]
"""The files of each split, in reading order."""


class BlankLines(Enum):
    """What to do with lines without words."""

    drop = "drop"
    keep = "keep"


@dataclass
class TextConfig(FileConfig):
    """Your own text: one sentence per line, words separated by whitespace."""

    name: str = "text"
    min_count: Count = 2
    dir: str | None = field(default=None, kw_only=True)
    """Folder with train, valid and test, each as .txt, .txt.gz, .txt.xz, .zip or a folder of such files."""
    lowercase: bool = field(default=False, kw_only=True)
    """Fold the text to lower case."""
    blank_lines: BlankLines = field(default=BlankLines.drop, kw_only=True)
    """drop ignores blank lines; keep ends each with </s>, as published WikiText counts do."""
    train: str | None = field(default=None, kw_only=True)
    """Pattern of the training files, as in data.train=news/*.txt.gz, instead of those in data.dir."""
    valid: str | None = field(default=None, kw_only=True)
    """The same for validation."""
    test: str | None = field(default=None, kw_only=True)
    """The same for test."""

    @property
    def token_rule(self) -> TokenRule:
        return TokenRule(WHITESPACE, self.lowercase, keep_blank_lines=self.blank_lines is BlankLines.keep)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.dir and not (self.train and self.valid and self.test):
            yield (
                "data.dir must name the folder with train.txt, valid.txt and test.txt; got nothing. "
                "Try data=text data.dir=PATH, or data.train=PATTERN data.valid=PATTERN data.test=PATTERN."
            )


@plugin("data", "text", TextConfig)
def source(config: TextConfig) -> Source:
    files = _find_files(config)
    folder = Path(config.dir).absolute() if config.dir else Path(config.train or "")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", folder.name)[:60] or "folder"
    rule = config.token_rule
    tag = files_tag(path for split in SPLITS for path in files[split])

    return text_source(
        config,
        lambda _: {split: [text for path in files[split] for text in text_files(path)] for split in SPLITS},
        folder=f"text-{name}-{tag}{'-lower' if config.lowercase else ''}{'-blank' if rule.keep_blank_lines else ''}",
        source=f"the text files of {str(folder)!r}",
        meta={"files": {split: [str(path) for path in files[split]] for split in SPLITS}},
        sentences="lines",
        splits=", ".join(
            files[split][0].name if len(files[split]) == 1 else f"{len(files[split])} files for {split}"
            for split in SPLITS
        ),
    )


def find_in_folder(name: str | None) -> Files:
    """Return the splits that a folder contains, each in one of the forms above."""
    folder = Path(name or "").absolute()
    try:
        if not name:
            raise FileNotFoundError(2, "nothing given")
        next(folder.iterdir(), None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.dir must name a folder with train.txt, valid.txt and test.txt; got {name!r} "
            f"({getattr(error, 'strerror', None) or error}). Try data.dir=PATH."
        ) from None
    return {split: paths for split in SPLITS if (paths := _split_files(folder, split))}


def _find_files(config: TextConfig) -> Files:
    patterns = {split: getattr(config, split) for split in SPLITS}
    files = find_in_folder(config.dir) if config.dir or not all(patterns.values()) else {}
    files |= {split: _matching(split, pattern) for split, pattern in patterns.items() if pattern}
    if missing := [split for split in SPLITS if split not in files]:
        raise UserError(
            f"data.dir must contain train.txt, valid.txt and test.txt; {config.dir!r} lacks "
            f"{', '.join(f'{split}.txt' for split in missing)}. Put it there as {', '.join(ENDINGS)} or a folder of "
            f"such files, or try data.{missing[0]}=PATTERN."
        )
    for split in ("valid", "test"):
        if shared := sorted({*files["train"]} & {*files[split]}):
            raise UserError(
                f"data.train and data.{split} must name different files; both name {str(shared[0])!r}. Make the "
                "patterns narrower."
            )
    return files


def _split_files(folder: Path, split: str) -> list[Path]:
    """Return the files of a split; none if the folder does not contain it."""
    forms = [path for ending in ENDINGS if (path := folder / f"{split}{ending}").is_file()]
    forms += [folder / split] * (folder / split).is_dir()
    if len(forms) > 1:
        raise UserError(
            f"data.dir must contain one form of each split; {str(folder)!r} contains "
            f"{' and '.join(path.name for path in forms)}. Remove one of them, or try data.{split}=PATTERN."
        )
    if forms != [folder / split]:
        return forms
    files = sorted(path for path in (folder / split).iterdir() if not path.name.startswith("."))
    if not files or (others := [path for path in files if not path.name.endswith(ENDINGS) or not path.is_file()]):
        raise UserError(
            f"{str(folder / split)!r} must contain only files that end in {', '.join(ENDINGS)}; got "
            f"{repr(others[0].name) if files else 'nothing'}. Move it elsewhere, or try data.{split}=PATTERN."
        )
    return files


def _matching(split: str, pattern: str) -> list[Path]:
    names = glob.glob(pattern, recursive=True)  # noqa: PTH207
    files = sorted(path for name in names if (path := Path(name).absolute()).is_file())
    if not files:
        raise UserError(
            f"data.{split} must be a file or a pattern of files; got {pattern!r}, which matches nothing in "
            f"{str(Path.cwd())!r}. Try data.{split}=news/*.txt."
        )
    return files
