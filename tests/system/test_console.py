"""Console output: escaping, tables, durations, progress with and without a terminal."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.system.console import Progress, byte_size, counted, duration, printable, say, table


@given(st.text())
def test_control_characters_are_escaped(text: str) -> None:
    shown = printable(text)
    assert all(character.isprintable() for character in shown)
    if text.isprintable():
        assert shown == text


def test_say_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\n\x07two")
    assert capsys.readouterr().out == "one\n\\x07two\n"


def test_tables_align_words_left_and_numbers_right() -> None:
    lines = table([["a", "1.50"], ["long name", "12.00"]], header=["who", "what"]).splitlines()
    assert lines == ["who         what", "---------  -----", "a           1.50", "long name  12.00"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0s"), (45, "45s"), (200, "3m20s"), (7500, "2h05m"), (273_600, "3d04h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (31_344_016, "31.3 MB"), (999_999, "1.0 MB"), (1_792_209_805, "1.8 GB")],
)
def test_sizes(count: int, text: str) -> None:
    assert byte_size(count) == text


@pytest.fixture(autouse=True)
def _line_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.system.console.LINE_SECONDS", 0.0)


def test_progress_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(31_344_016, label="text8.zip", unit="B") as progress:
        progress.advance(1_500_000)
    assert capsys.readouterr().out.startswith("text8.zip 1.5 MB/31.3 MB  ETA ")


def test_progress_without_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, start=2, label="train", unit="steps") as progress:
        progress.show(loss="3.1", ppl="22")
        progress.advance(3)
        assert progress.remaining() is not None
    out = capsys.readouterr()
    assert out.out.startswith("train 5/10 steps  loss 3.1  ppl 22")
    assert out.err == ""


def test_terminal_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress(4, label="train", unit="steps") as progress:
        for _ in range(4):
            progress.show(ppl="22")
            progress.advance()
        progress.bar.refresh()
    assert "train: 100%" in screen.getvalue()
    assert "ppl=22" in screen.getvalue()


def test_progress_lines_use_the_given_stream(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(None, label="read", unit="lines", to=sys.stderr) as progress:
        progress.advance(7)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "read 7 lines\n"


def test_single_value_is_not_a_list() -> None:
    assert [counted(n, "line") for n in (0, 1, 1200)] == ["0 lines", "1 line", "1,200 lines"]
