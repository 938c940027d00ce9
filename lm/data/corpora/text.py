"""Your own text: one sentence per line, words separated by whitespace.

`data.dir` is a folder with each split as a file in one of the formats of `lm.data.formats` (`train.txt`,
`train.jsonl.zst`) or as a folder `train/` of such files. `data.train`, `data.valid` and `data.test` are patterns of
files, each read in alphabetical order. Missing splits can be cut from the training lines.
"""

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from lm.config.groups import Count, Range, plugin
from lm.data.formats import ENDINGS, ENDINGS_TEXT, hold_out, text_files
from lm.data.source import SPLITS, FileConfig, Source, Splits, TextFile, files_tag, text_source
from lm.data.text.tokenize import WHITESPACE, TokenRule
from lm.system.errors import UserError

Files = dict[str, list[Path]]
"""The files of each split, in reading order."""


@dataclass
class TextConfig(FileConfig):
    """Your own text: one sentence per line, words separated by whitespace."""

    name: str = "text"
    min_count: Count = 2
    dir: str | None = field(default=None, kw_only=True)
    """Folder with train, valid and test, each as .txt, .jsonl or .parquet, or compressed, or a folder of such files."""
    lowercase: bool = field(default=False, kw_only=True)
    """Convert the text to lower case."""
    blank_lines: Literal["drop", "keep"] = field(default="drop", kw_only=True)
    """drop ignores blank lines; keep ends each with </s>, as published WikiText counts do."""
    train: str | list[str] | None = field(default=None, kw_only=True)
    """Training files instead of those in data.dir: a file, a pattern as in data.train=news/*.txt.gz, or a list."""
    valid: str | list[str] | None = field(default=None, kw_only=True)
    """Validation files, given like data.train."""
    test: str | list[str] | None = field(default=None, kw_only=True)
    """Test files, given like data.train."""
    holdout: Annotated[float | None, Range(above=0, below=0.5)] = field(default=None, kw_only=True)
    """Fraction of the training lines to use for each missing split, chosen by hash; null requires all splits."""
    field: str = field(default="text", kw_only=True)  # last: it hides the function of that name
    """Field of .jsonl records, or column of .parquet files, that contains the text."""

    @property
    def token_rule(self) -> TokenRule:
        return TokenRule(WHITESPACE, self.lowercase, keep_blank_lines=self.blank_lines == "keep")

    def patterns(self, split: str) -> list[str]:
        """Patterns of a split's files; none if they are in data.dir."""
        value = getattr(self, split)
        return value if isinstance(value, list) else [value] if value else []

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.dir and not all(map(self.patterns, SPLITS[:1] if self.holdout else SPLITS)):
            yield (
                "data.dir must name the folder with train.txt, valid.txt and test.txt; got nothing. "
                "Try data=text data.dir=PATH, or data.train=FILE data.holdout=0.01."
            )


@plugin("data", "text", TextConfig)
def source(config: TextConfig) -> Source:
    files = _find_files(config)
    missing = [split for split in SPLITS if split not in files]
    folder = Path(config.dir).absolute() if config.dir else files["train"][0].parent
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", folder.name)[:60] or "folder"
    sizes = {split: len(paths) for split, paths in files.items()}
    tag = files_tag((path for paths in files.values() for path in paths), sizes, config.field)
    errors, share = config.encoding_errors, config.holdout or 0
    options = ["lower"] * config.lowercase + ["blank"] * config.token_rule.keep_blank_lines
    options += [f"field_{config.field}"] * (config.field != "text") + [f"holdout{share}"] * bool(missing)

    def open_splits(scratch: Path) -> Splits:
        texts: dict[str, Sequence[TextFile]] = {
            split: [text for path in paths for text in text_files(path, field=config.field, errors=errors)]
            for split, paths in files.items()
        }
        return texts | hold_out(texts["train"], missing, share, scratch, errors=errors) if missing else texts

    names = {split: paths[0].name if len(paths) == 1 else f"{len(paths)} files" for split, paths in files.items()}
    names |= dict.fromkeys(missing, f"{share:.3g} of the training lines")
    return text_source(
        config,
        open_splits,
        folder="-".join([f"text-{name}-{tag}", *options]),
        source=f"the text files of {str(folder)!r}",
        meta={"files": {split: [str(path) for path in paths] for split, paths in files.items()}},
        splits=", ".join(f"{split}: {names[split]}" for split in SPLITS),
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
    """Find the files of each split; a split that is to be held out is missing."""
    files = find_in_folder(config.dir) if config.dir or not config.train else {}
    files |= {split: _matching(split, patterns) for split in SPLITS if (patterns := config.patterns(split))}
    missing = [split for split in SPLITS if split not in files]
    if "train" in missing or (missing and not config.holdout):
        cut = "" if "train" in missing else ", or data.holdout=0.01 to cut it from train"
        raise UserError(
            f"data.dir must contain train.txt, valid.txt and test.txt; {config.dir!r} lacks "
            f"{', '.join(f'{split}.txt' for split in missing)}. Put it there as {ENDINGS_TEXT} or a folder of such "
            f"files, or try data.{missing[0]}=PATTERN{cut}."
        )
    if config.holdout and not missing:
        raise UserError(
            f"data.holdout must be null if no split is missing; got {config.holdout}. Try data.holdout=null."
        )
    train = {path.resolve() for path in files["train"]}
    for split in ("valid", "test"):
        if shared := [path for path in files.get(split, ()) if path.resolve() in train]:
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
            f"{str(folder / split)!r} must contain only files that end in {ENDINGS_TEXT}; got "
            f"{repr(others[0].name) if files else 'nothing'}. Move it elsewhere, or try data.{split}=PATTERN."
        )
    return files


def _matching(split: str, patterns: list[str]) -> list[Path]:
    """Return the files that match the patterns, each pattern's in alphabetical order."""
    files: list[Path] = []
    for pattern in patterns:
        names = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)  # noqa: PTH207
        paths = sorted(Path(name).absolute() for name in names)
        files += (found := [path for path in paths if path.is_file()])
        if not found:
            reason = "is a folder" if paths else f"matches nothing in {str(Path.cwd())!r}"
            raise UserError(
                f"data.{split} must be a file, a pattern of files or a list of these; {pattern!r} {reason}. "
                f"Try data.{split}={pattern.rstrip('/') if paths else 'news'}/*.txt."
            )
    return list(dict.fromkeys(files))
