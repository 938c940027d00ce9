"""N-best lists: both formats, unchanged ids, totals and the best line."""

from pathlib import Path

import pytest

import lm
from lm.inference.nbest import Hypothesis, best_lines, parse
from lm.system.errors import UserError
from tests.conftest import Command
from tests.data.test_formats import COMPRESS


def test_reads_both_formats() -> None:
    for line, expected in [
        ("utt-1 hello there", ("utt-1", [], "hello there")),
        ("utt-1", ("utt-1", [], "")),
        ("utt\t-3.5\thello  there", ("utt", ["-3.5"], "hello  there")),
        ("utt\t-3.5\t 1e2 \thello", ("utt", ["-3.5", "1e2"], "hello")),
        ("utt\thello", ("utt", [], "hello")),
    ]:
        found = parse(line, source="FILE", number=1)
        assert (found.id, found.scores, found.text) == expected
    wrong = ["", "\t1\thello", "a b\t1\thello", "utt\tone\thello", "utt\tnan\thello", "utt\t-1e308\thello"]
    for line in [*wrong, "utt -3.5 hello", "-3.5 -1.25 3 hello there"]:
        with pytest.raises(UserError, match="input=FILE, line 7: expected `id text`"):
            parse(line, source="FILE", number=7)
    with pytest.raises(UserError, match="without a header; got SRILM's NBestList1"):
        parse("NBestList1.0", source="FILE", number=1)


@pytest.mark.parametrize(
    ("file", "name"), [("a/s1.A.02.gz", "s1.A.02"), ("s1.nbest.xz", "s1"), ("u.txt", "u"), ("u", "u")]
)
def test_srilm_files_are_named_after_utterances(file: str, name: str) -> None:
    found = parse("-3.5 -1e2 2 hello there", source=file, number=1)
    assert (found.id, found.scores, found.text) == (name, ["-3.5", "-1e2"], "hello there")


def test_totals_and_best_line() -> None:
    first = Hypothesis("u", ["-1.5", "2"], "a b", words=["a", "b"], log_probs=[-1.5, -2.5])
    assert first.total([0.5, 0.1]) == pytest.approx(-1.5 + 2 - 2 - 0.2)
    assert first.total([0.5, 0.1, 2]) == pytest.approx(-3 + 2 - 2 - 0.2)
    second, third = Hypothesis("u", [], "c", words=["c"], log_probs=[-3.0]), Hypothesis("v", [], "", log_probs=[-9.0])
    chosen = list(best_lines([first, second, third], "same", [1, 0]))
    assert chosen == ["u c", "v"]
    assert list(best_lines([first, second], "same", [0, 0])) == ["u a b"]
    with pytest.raises(UserError, match="must be on consecutive lines; those of 'u' are not"):
        list(best_lines([first, third, second], "same", [1, 0]))


def test_numbered_ids_share_an_utterance() -> None:
    lines = [Hypothesis(f"{name}-{n}", [str(n)], f"{name}{n}") for name in ("s1-a", "s1-b") for n in (1, 2, 10)]
    assert list(best_lines(lines, "numbered", [1, 0])) == ["s1-a s1-a10", "s1-b s1-b10"]


def test_nbest_command(tiny_run: Path, command: Command, workspace: Path) -> None:
    (workspace / "list").write_text("u1\t-2\tw000001 w000002\nu1\t-1\tw000002\nu2 w000003\n")
    model = lm.load(tiny_run)
    ours = [model.score(text).log_prob for text in ("w000001 w000002", "w000002", "w000003")]
    arguments = [f"checkpoint={tiny_run}", "mode=score", "format=nbest", "input=list", "lm_weight=2", "word_penalty=1"]
    rows = [line.split("\t") for line in command("evaluate.py", *arguments).stdout.splitlines()]
    assert [row[0] for row in rows] == ["u1", "u1", "u2"]
    assert [float(row[2]) for row in rows] == pytest.approx(ours, abs=1e-5)
    totals = [float(row[1]) for row in rows]
    assert totals == pytest.approx([2 * ours[0] - 2 - 2, 2 * ours[1] - 1 - 1, 2 * ours[2] - 1], abs=1e-5)
    assert [row[3:] for row in rows] == [["-2", "w000001 w000002"], ["-1", "w000002"], ["w000003"]]
    best = command("evaluate.py", *arguments, "best=same").stdout.splitlines()
    assert best == [f"u1 {rows[0 if totals[0] > totals[1] else 1][-1]}", "u2 w000003"]


def test_numbered_needs_numbers(tiny_run: Path, command: Command, workspace: Path) -> None:
    (workspace / "list").write_text("u-1 w000001\nthe w000002\n")
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=score", "format=nbest", "input=list", "best=numbered"]
    for more in ([], ["state=carried"]):
        failed = command(*ask, *more, "out=best", check=2).stderr
        assert "best=numbered needs ids that end in -1, -2 and so on; got 'the' in line 2." in failed
        assert not (workspace / "best").exists()


@pytest.mark.parametrize(("ids", "is_noted"), [(["u-1", "u-2"], True), (["u", "u", "v"], False), (["u"], False)])
def test_note_if_each_utterance_has_one_hypothesis(
    ids: list[str], is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    list(best_lines([Hypothesis(name, [], "") for name in ids], "same", [1, 0]))
    assert ("Try best=numbered." in capsys.readouterr().err) == is_noted


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_lists_score_the_same(tiny_run: Path, command: Command, workspace: Path, ending: str) -> None:
    content = b"u1-1\t-2\tw000001 w000002\nu1-2\t-1\tw000002\n"
    (workspace / "list").write_bytes(content)
    (workspace / f"list{ending}").write_bytes(COMPRESS[ending](content))
    (workspace / f"refs{ending}").write_bytes(COMPRESS[ending](b"u1 w000002\n"))
    (workspace / f"cut{ending}").write_bytes(COMPRESS[ending](content)[:-9])
    ask = ["evaluate.py", f"checkpoint={tiny_run}", "mode=score", "format=nbest", "best=numbered"]
    plain = command(*ask, "input=list").stdout
    done = command(*ask, f"input=list{ending}", f"references=refs{ending}")
    assert done.stdout == plain and "in 1 word (" in done.stderr
    failed = command(*ask, f"input=cut{ending}", "out=best", check=2).stderr
    assert f"'cut{ending}' must be a complete archive or compressed file" in failed
    assert not (workspace / "best").exists()
