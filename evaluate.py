"""Score a trained model, or text with it; see `python evaluate.py --help`."""

from lm.evaluate import start

if __name__ == "__main__":
    start()
