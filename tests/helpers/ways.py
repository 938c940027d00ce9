"""Settings of every core, input, kind of tying and n-gram weights, for contract tests."""

from lm.config.groups import plugin_names

SMALL = "model.embedding_size=16 model.hidden_size=16"
SPECIAL = {
    "adaptive": "input=adaptive input.cutoffs=[10,20]",
    "char_cnn": "input=char_cnn input.filters=[3,4,5] input.byte_size=4",
    "scrn": "model=scrn model.context_size=4",
}
TIED = [
    f"model.tie=true output=full {SMALL}",
    f"model.tie=true input=adaptive output=adaptive output.cutoffs=[10,20] {SMALL}",
]
MAXENT = [
    f"model.maxent.order=3 model.maxent.size=50000 {output} {SMALL}"
    for output in ("output=full", "output=hsm_freq", "output=adaptive output.cutoffs=[10,20]")
]
CORES = [f"{SPECIAL.get(name, f'model={name}')} {SMALL}" for name in plugin_names("model")]
TRANSFORMER = f"model=transformer {SMALL}"
INPUTS = [f"{SPECIAL.get(name, f'input={name}')} {SMALL}" for name in plugin_names("input")]
VARIANTS = [f"model=rnn model.nonlinearity=tanh {SMALL}", f"model=gru model.layers=2 model.projection=8 {SMALL}"]
AWD = [
    f"model={core} model.layers=2 model.locked_dropout=true model.input_dropout=0.4 model.output_dropout=0.3 "
    f"model.word_dropout=0.3 model.weight_drop=0.5 model.activation_penalty=2 model.change_penalty=1 {SMALL}"
    for core in ("lstm", "gru", "rnn")
]
"""Every regularizer of AWD-LSTM."""
WAYS = [*CORES, *INPUTS, *VARIANTS, *TIED, *MAXENT, *AWD]
