"""Text to token ids on disk, and from there to batches.

    corpus = open_corpus(config.data)        # prepares it on first use
    corpus.split("train")                    # ids, memory-mapped
    corpus.vocabulary.decode(ids)

Read `opening` first. Each file in `corpora/` says where one text comes from; `fetch/` downloads and reads archives;
`encode` turns text into ids (`fast_encode` large ones); `write` puts them into the folder that `corpus` opens;
`batches` cuts them into training batches.
"""
