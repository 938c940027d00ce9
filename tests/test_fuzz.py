"""Random settings and damaged files: every command ends with code 0 or 2, and never with a traceback.

python -m tests.test_fuzz 2000 [SEED]    run 2000 cases and print the bad ones
"""

import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from lm.config.registry import plugin_names
from lm.config.validate import all_settings, flatten, quoted
from tests.conftest import SCHEMAS, TINY, composed, run_command

SECONDS = 5
"""Processor time of a case."""
VALUES = """
    null true 0 -1 1 2 3 7 0.5 -0.5 1.5 1e-5 1e-200 1e39 1e308 nan inf -inf 100 100000000000 9223372036854775807
    9223372036854775808 18446744073709551616 auto flops [] [1,2] [2,1] [a] {} {a:1} x 'ß' '\u202e' '' /dev/null
    /proc/self/mem . .. / run run/checkpoints/last.pt run/metrics.jsonl nowhere/nothing
""".split()  # noqa: SIM905
SLOW = ("resume", "mix", "data.url", "data.root", "run_dir", "out", "json", "trainer.device", "device")
"""Settings left alone: what they name would be downloaded, or written outside the case's folder."""
COMMANDS = {
    "train.py": ("train", [*TINY, "trainer.dry_run=true"]),
    "evaluate.py": ("evaluate", ["checkpoint=run", "splits=[test]"]),
    "lm/generate.py": ("generate", ["checkpoint=run", "prompt=w000001", "max_words=3"]),
    "lm/ngram/__main__.py": ("ngram", ["data=zipf", "data.vocab_size=30", "data.tokens=2000", "order=2"]),
}
GROUPS = ("input", "model", "output", "optim")


class TooSlow(BaseException):
    """Not an Exception, which a command might explain."""


def cases(seed: int) -> Iterator[tuple[str, list[str], tuple[int, int] | None]]:
    """Yield commands with one to three random settings and, for some, a byte of the checkpoint to change."""
    draw = random.Random(seed)
    defaults = {name: asdict(composed(*given, name=name)) for name, given in COMMANDS.values()}
    while True:
        script = draw.choices(list(COMMANDS), weights=[6, 3, 2, 1])[0]
        name, given = COMMANDS[script]
        words, values = list(given), dict(defaults[name])
        if script == "train.py" and draw.random() < 0.5:
            group = draw.choice(GROUPS)
            choice = draw.choice(plugin_names(group))
            words.append(f"{group}={choice}")
            values[group] = asdict(composed(*given, name=name))[group] | {"name": choice}
        keys = {setting.key for setting in all_settings(SCHEMAS[name], values)} | {*flatten(values)}
        for key in draw.sample(sorted(keys.difference(SLOW)), draw.randint(1, 3)):
            if not key.endswith(".name"):
                value = draw.choice(VALUES)
                words.append(f"{key}={value}" if value[0] not in "/." else f"{key}={quoted(value)}")
        is_read = script in ("evaluate.py", "lm/generate.py")
        yield script, words, (draw.getrandbits(40), draw.randrange(1, 256)) if is_read and draw.random() < 0.3 else None


def problem(folder: Path, script: str, words: list[str], damage: tuple[int, int] | None) -> str | None:
    """Run a case; return what was wrong with its answer."""

    def too_slow(*_: object) -> None:
        raise TooSlow

    last = folder / "run/checkpoints/last.pt"
    whole = last.read_bytes()
    if damage is not None:
        place, flipped = damage[0] % len(whole), bytearray(whole)
        flipped[place] ^= damage[1]
        last.write_bytes(flipped if damage[0] % 3 else flipped[:place])
    before = signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        done = run_command(folder, script, *words, check=None)
    except (Exception, TooSlow):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        last.write_bytes(whole)
        for made in {*folder.glob("runs/*"), *folder.glob("run/evaluation*")}:
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    if done.returncode not in (0, 2) or "Traceback" in done.stderr:
        return f"exit code {done.returncode}\n{done.stderr}"
    if done.returncode == 2 and not done.stderr.strip():
        return "refused without a word"
    return None


def bad(folder: Path, number: int, seed: int) -> Iterator[str]:
    if not (folder / "run").exists():
        run_command(folder, "train.py", *TINY, "run_dir=run")
    for _, (script, words, damage) in zip(range(number), cases(seed), strict=False):
        given = len(COMMANDS[script][1])
        if (wrong := problem(folder, script, words, damage)) is not None:
            yield f"{script} {' '.join(words[given:])} {damage or ''}\n{wrong}"


@pytest.mark.filterwarnings("ignore")
def test_random_settings_are_answered(tmp_path: Path) -> None:
    assert list(bad(tmp_path, 60, seed=1)) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = 0
        for text in bad(Path(scratch), int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])):
            found += 1
            print(text, flush=True)
        print(f"{sys.argv[1]} cases, {found} bad")
