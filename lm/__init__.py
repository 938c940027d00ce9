"""Train word-level language models over very large vocabularies."""
