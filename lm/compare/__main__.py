"""python -m lm.compare RUNS... [--out FOLDER] [--keep FOLDER] [--columns NAMES]"""

import argparse
import sys
from pathlib import Path

from lm.compare import compare
from lm.compare.table import choose_columns
from lm.system.console import own_command
from lm.system.errors import guarded


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=own_command("compare"),
        description="Compare runs, finished or not: perplexity, time, speed and memory as a table and as plots.",
    )
    parser.add_argument("runs", nargs="*", metavar="RUNS", type=Path, help="run folders, or folders that hold runs")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="where tables and plots are written (comparison, beside the runs)"
    )
    parser.add_argument(
        "--keep", metavar="FOLDER", type=Path, help="also copy the runs' metrics there, without weights, to share"
    )
    parser.add_argument(
        "--columns", metavar="NAMES", help="columns of the tables, such as 'valid ppl,test ppl,minutes'"
    )
    with guarded():
        given = parser.parse_args(arguments)
        columns = choose_columns(given.columns) if given.columns else ()
        compare(given.runs, out=given.out, kept_in=given.keep, columns=columns)


def start() -> None:
    main(sys.argv[1:])


if __name__ == "__main__":
    start()
