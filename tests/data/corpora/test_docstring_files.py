"""Docstrings read from source against those that Python itself finds when it imports the same source."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

from lm.data.corpora.docstrings import docstrings_of, read_docstrings

SOURCE = '''
"""The module's own,
    on two lines."""
import math

TEXT = """no docstring"""

class Outer:
    "One line."

    def method(self):
        r"""A raw \\string."""
        "not this one"

    class Inner:
        async def method(self):
            """Of a coroutine."""

        def silent(self):
            return 1

if math:
    def conditional():
        """Inside an if."""
else:
    try:
        pass
    except ValueError:
        pass

def last(argument="no"):
    \'\'\'   Indented,

        and in two paragraphs.
    \'\'\'
'''


def by_import(path: Path) -> list[str]:
    spec = importlib.util.spec_from_file_location("documented", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def of(thing: Any) -> list[str | None]:
        inner = [v for v in vars(thing).values() if inspect.isclass(v) or inspect.isfunction(v)]
        return [thing.__doc__, *(text for v in inner for text in of(v))]

    return [inspect.cleandoc(text) for text in of(module) if text]


def test_they_are_those_of_the_imported_module(tmp_path: Path) -> None:
    path = tmp_path / "documented.py"
    path.write_text(SOURCE)
    found = docstrings_of([path])
    assert found == by_import(path)
    assert len(found) == 6


def test_files_are_not_run_and_those_that_cannot_be_parsed_have_none(tmp_path: Path) -> None:
    contents = ['"""Kept."""\nraise SystemExit', "print 'Python 2'", b'"""\xff"""', "x = '\0'", '"""Last."""']
    files = [tmp_path / f"{number}.py" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert list(read_docstrings([*files[:2], tmp_path / "gone.py", *files[2:]])) == ["Kept.", "Last."]


def test_escapes_that_spell_half_a_character_can_be_encoded(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(r'"""One \ud800 half."""')
    assert docstrings_of([tmp_path / "half.py"]) == ["One ? half."]
