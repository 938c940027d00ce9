"""Train a word-level language model; see `python train.py --help`."""

from lm.train import start

if __name__ == "__main__":
    start()
