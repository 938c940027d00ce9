"""Text to token ids on disk, and from there to batches.

    corpus = open_corpus(config.data)        # prepares it on first use
    corpus.split("train")                    # ids, memory-mapped
    corpus.vocabulary.decode(ids)

A file in `corpora/` returns a `source.Source`: the text files of each split and how they become tokens. `prepare` opens
it (with `archive` for published corpora), `encode` turns the text into ids, and `corpus` opens the
result. `batches` cuts the ids into training batches.
"""
