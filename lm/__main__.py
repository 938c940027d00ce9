"""adaptive-lm COMMAND ...: everything that the scripts of the repository do, from any folder.

adaptive-lm train       train a word-level language model
adaptive-lm evaluate    perplexity, or scores of text
adaptive-lm generate    write text with a trained model
adaptive-lm prepare     download and prepare a corpus
adaptive-lm ngram       count a corpus's n-grams
adaptive-lm compare     tables and plots of runs
adaptive-lm export      ONNX files and torch.export programs
adaptive-lm --version

adaptive-lm COMMAND --help lists a command's settings.
"""

import sys
from importlib import import_module

from lm import __version__
from lm.system.console import PROGRAM
from lm.system.errors import UserError, guarded

COMMANDS = {
    "train": "lm.train",
    "evaluate": "lm.evaluate",
    "generate": "lm.generate",
    "prepare": "lm.prepare",
    "ngram": "lm.ngram.__main__",
    "compare": "lm.compare.__main__",
    "export": "lm.export.__main__",
}


def main() -> None:
    """Start the command named by the first argument; it parses the others."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    with guarded():
        if name == "--version":
            print(f"{PROGRAM} {__version__}")
        elif name in ("--help", "-h"):
            print((__doc__ or "").strip())
        elif name in COMMANDS:
            sys.argv[0] = PROGRAM
            import_module(COMMANDS[name]).start()
        else:
            raise UserError(f"{name} is not a command. The commands are: {', '.join(COMMANDS)}.")


if __name__ == "__main__":
    main()
