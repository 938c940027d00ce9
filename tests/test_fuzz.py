"""Random settings and damaged files: commands end with code 0 or 2, without a traceback, and no number changes unsaid.

python -m tests.test_fuzz 2000 [SEED]    run 2000 cases and print the bad ones
"""

import bz2
import gzip
import lzma
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest

from lm.config.groups import plugin_names
from lm.config.validate import Setting, all_settings, flatten, quoted, split_annotation, typed
from tests.conftest import SCHEMAS, TINY, composed, run_command

SECONDS, GIGABYTES = 5, 2
"""Processor time of a case, and memory beyond that of the process so far."""
NUMBERS = """
    0 -1 1 2 3 7 0.5 -0.5 1.5 1e-5 1e-200 1e-320 1e39 1e308 nan inf -inf 100 100000000000 9223372036854775807
    9223372036854775808 18446744073709551616
""".split()  # noqa: SIM905
OTHERS = """
    null true auto flops [] [1,2] [2,1] [a] {} {a:1} x 'ß' '\u202e' '\udcff' '' /dev/null /proc/self/mem . .. / run
    run/checkpoints/last.pt run/metrics.jsonl text/train.txt.gz nowhere/nothing
""".split()  # noqa: SIM905
VALUES = NUMBERS + OTHERS
PLAUSIBLE = {bool: ["true", "false"], int: ["1", "2", "3", "7"], float: ["0.1", "0.5", "0.9", "1.0"]}
NAMES = ["''", "null", "new", "new/er", "'ß'", "'\udcff'", "run", "text/train.txt.gz/new", "x" * 300]
"""Values of settings that name what is written."""
WRITTEN = ("run_dir", "out", "json")
SLOW = ("resume", "mix", "data.url", "data.root", "trainer.device", "device")
"""Settings left alone: what they name would be downloaded, or written outside the case's folder."""
ENDLESS = ("samples", "max_words", "trainer.max_steps"), "100000000000"
"""Settings whose work is as much as they say, and a value that would not end."""
ZIPF = ["data=zipf", "data.vocab_size=30", "data.tokens=2000"]
TEXT = ["data=text", "data.dir=text"]
COMMANDS = {
    "train.py": ("train", [*TINY, "trainer.max_steps=3", "trainer.dry_run=true"], 5),
    "train.py ": ("train", [*TINY, "trainer.max_steps=3"], 3),
    "evaluate.py": ("evaluate", ["checkpoint=run", "splits=[test]"], 4),
    "lm/generate.py": ("generate", ["checkpoint=run", "prompt=w000001", "max_words=3"], 3),
    "lm/ngram/__main__.py": ("ngram", [*ZIPF, "order=2"], 3),
    "lm/prepare.py": ("prepare", TEXT, 2),
    "lm/export/__main__.py": ("export", ["checkpoint=run", "out=new"], 1),
}
"""Config, settings and relative frequency of each command."""
READS = [
    ("evaluate.py checkpoint=run splits=[test]", "run/checkpoints/last.pt"),
    ("evaluate.py checkpoint=run splits=[test]", "data/zipf-*/test.bin"),
    ("evaluate.py checkpoint=run splits=[test]", "data/zipf-*/vocab.tsv"),
    ("evaluate.py checkpoint=run splits=[test]", "data/zipf-*/meta.json"),
    ("lm/generate.py checkpoint=run prompt=w000001 temperature=0", "run/checkpoints/last.pt"),
    (f"train.py {' '.join(TINY)} trainer.max_steps=2 init=run", "run/checkpoints/last.pt"),
    (f"lm/ngram/__main__.py {' '.join(ZIPF)} arpa=counts.arpa.gz", "counts.arpa.gz"),
    (f"lm/ngram/__main__.py {' '.join(TEXT)} order=2", "text/train.txt.gz"),
    (f"lm/ngram/__main__.py {' '.join(TEXT)} order=2", "text/valid.txt.xz"),
    (f"lm/ngram/__main__.py {' '.join(TEXT)} order=2", "text/test.txt.bz2"),
    ("evaluate.py checkpoint=counts", "counts/checkpoints/last.pt"),
]
"""Commands and a file with a checksum that they read; its damage must not change a number."""
UNCHECKED = [("lm.compare run counts", f"run/{name}") for name in ("summary.json", "metrics.jsonl", "config.yaml")]
"""Files without a checksum: damage must be survived."""


class TooSlow(BaseException):
    """Not an Exception, which a command might explain."""


class Case(NamedTuple):
    script: str
    words: list[str]
    file: str | None = None
    """What is damaged."""
    place: int = 0
    change: int = 0

    def damaged(self, content: bytes) -> bytes:
        """Flip bits of a byte, cut the rest off, or zero a block."""
        at = self.place % len(content)
        flipped = bytes([content[at] ^ self.change]) + content[at + 1 :]
        return content[:at] + {0: b"", 1: bytes(64) + content[at + 64 :]}.get(self.place // len(content) % 6, flipped)


def cases(seed: int) -> Iterator[Case]:
    """Yield commands with one to three random settings, or with a damaged file."""
    draw = random.Random(seed)
    defaults = {script: asdict(composed(*given, name=name)) for script, (name, given, _) in COMMANDS.items()}
    while True:
        if draw.random() < 0.25:
            command, file = draw.choice([*READS, *READS, *UNCHECKED])
            script, *words = command.split()
            yield Case(script, words, file, draw.getrandbits(40), draw.randrange(1, 256))
            continue
        (script,) = draw.choices(list(COMMANDS), weights=[weight for *_, weight in COMMANDS.values()])
        name, given, _ = COMMANDS[script]
        words, values = list(given), dict(defaults[script])
        if name == "train" and draw.random() < 0.7:
            group = draw.choice(("input", "model", "output", "optim"))
            choice = draw.choice(plugin_names(group))
            words.append(f"{group}={choice}")
            values[group] = asdict(composed(*given, name=name))[group] | {"name": choice}
        known = {setting.key: setting for setting in all_settings(SCHEMAS[name], values)}
        for key in draw.sample(sorted({*known, *flatten(values)}.difference(SLOW)), draw.randint(1, 3)):
            if not key.endswith(".name"):
                value = draw.choice(choices(known.get(key), draw))
                words.append(f"{key}={value}" if value[:1] not in ("/", ".") else f"{key}={quoted(value)}")
        yield Case(script.strip(), words)


def choices(setting: Setting | None, draw: random.Random) -> list[str]:
    """Values of a setting: half of the time fitting ones, else any; more numbers if it is one."""
    if setting is None:
        return VALUES
    name = setting.key.rpartition(".")[2]
    if setting.key in WRITTEN:
        return NAMES
    annotation, _ = split_annotation(get_type_hints(setting.owner, include_extras=True)[name])
    options: list[Any] = [annotation, *get_args(annotation)]
    named = [value for option in options if get_origin(option) is Literal for value in get_args(option)]
    fitting = [typed(value) for value in named] or next((PLAUSIBLE[o] for o in options if o in PLAUSIBLE), VALUES)
    if draw.random() < 0.5:
        return fitting
    wild = NUMBERS if {int, float}.intersection(options) and draw.random() < 0.5 else VALUES
    return [value for value in wild if setting.key not in ENDLESS[0] or value != ENDLESS[1]]


class Bench:
    """A folder with a run, a count model and a text, to run cases in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, dict[str, list[str]]()
        draw, lines = random.Random(0), []
        for _ in range(300):
            lines.append(" ".join(draw.choice("abcdefgh") * draw.randint(1, 3) for _ in range(draw.randint(1, 12))))
        (folder / "text").mkdir()
        packed = {"train.txt.gz": gzip.compress, "valid.txt.xz": lzma.compress, "test.txt.bz2": bz2.compress}
        for name, pack in packed.items():
            (folder / "text" / name).write_bytes(pack(("\n".join(lines) + "\n").encode()))
        run_command(folder, "train.py", *TINY, "run_dir=run")
        counts = [*ZIPF, "order=2", "run_dir=counts", "out=counts.arpa.gz"]
        run_command(folder, "lm/ngram/__main__.py", *counts)
        self.files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def problem(self, case: Case) -> str | None:
        """Run a case; return what was wrong with its answer. The first use of a function may compile it for seconds."""
        wrong = self._attempt(case)
        return self._attempt(case) if wrong is not None and "TooSlow" in wrong else wrong

    def _attempt(self, case: Case) -> str | None:
        expected = None
        if (case.script, case.file) in ((read.split()[0], file) for read, file in READS):
            command = " ".join(case.words)
            if command not in self.numbers:
                self.numbers[command] = numbers_in(run_command(self.folder, case.script, *case.words).stdout)
                self.restore()
            expected = self.numbers[command]
        if case.file is not None:
            (path,) = self.folder.glob(case.file)
            path.write_bytes(case.damaged(self.files[path]))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = signal.signal(signal.SIGPROF, too_slow)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            done = run_command(self.folder, case.script, *case.words, check=None)
        except (Exception, TooSlow):
            return traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
            self.restore()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / (1 << 20)
        if grown > GIGABYTES:
            return f"took {grown:.1f} GiB of memory"
        if done.returncode not in (0, 2) or "Traceback" in done.stderr:
            return f"exit code {done.returncode}\n{done.stderr}"
        if done.returncode == 2 and not done.stderr.strip():
            return "refused without a word"
        if done.returncode == 0 and expected not in (None, numbers_in(done.stdout)):
            return f"other numbers without a word:\n{done.stdout}"
        return None

    def restore(self) -> None:
        """Undo what a command has written."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_symlink() or (path.is_file() and path not in self.files):
                path.unlink()
            elif path.is_dir() and not any(path in kept.parents for kept in self.files):
                shutil.rmtree(path)
        for path, content in self.files.items():
            if not path.exists() or path.stat().st_size != len(content) or path.read_bytes() != content:
                path.write_bytes(content)


def too_slow(*_: object) -> None:
    raise TooSlow


def numbers_in(output: str) -> list[str]:
    """Return the perplexities and texts of a command's output, without its times and sizes."""
    return re.findall(r"\d\.\d\d\b(?! [kMG]i?B)|\bw0\d+", output)


def bad(folder: Path, number: int, seed: int) -> Iterator[str]:
    bench = Bench(folder)
    for _, case in zip(range(number), cases(seed), strict=False):
        if (wrong := bench.problem(case)) is not None:
            yield f"{case}\n{wrong}"


@pytest.mark.filterwarnings("ignore")
def test_random_settings_and_damage_are_answered(tmp_path: Path) -> None:
    assert list(bad(tmp_path, 200, seed=1)) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = 0
        for text in bad(Path(scratch), int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])):
            found += 1
            print(text, flush=True)
        print(f"{sys.argv[1]} cases, {found} bad")
