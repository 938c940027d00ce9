"""Write TensorBoard events: curves, a page comparing runs, hyperparameters.

All runs use the same layout and hyperparameter description, which TensorBoard merges, so any set of runs
can be shown together. A single writer is used because `add_hparams` would create a second run.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import Summary, SummaryMetadata  # type: ignore[attr-defined]

from lm.config.validate import typed

GROUPS = ("valid", "test", "train", "speed", "optim", "output", "memory")
"""Most important first. TensorBoard sorts by name, so a number in the tag keeps this order."""


def drawn_as(tag: str) -> str:
    """Return the TensorBoard tag: the metric with its group's number, so that validation comes first."""
    group = tag.partition("/")[0]
    return f"{GROUPS.index(group) + 1 if group in GROUPS else len(GROUPS) + 1}_{tag}"


BY_SECOND = drawn_as("valid/ppl_by_training_second")
LAYOUT = {
    "comparison": {
        "validation perplexity by training second": ["Multiline", [f"^{BY_SECOND}$"]],
        "validation perplexity by step": ["Multiline", [f"^{drawn_as('valid/ppl')}$"]],
        "training perplexity by step": ["Multiline", [f"^{drawn_as('train/ppl')}$"]],
        "training tokens per second by step": ["Multiline", [f"^{drawn_as('speed/tokens_per_s')}$"]],
    }
}
"""Layout of the Custom Scalars page: each chart shows matching tags of every run."""

NUMBERS = """
    model.embedding_size model.hidden_size model.layers model.dropout output.sample_fraction output.num_classes optim.lr
    optim.max_grad_norm optim.weight_decay trainer.batch_size trainer.bptt seed
""".split()  # noqa: SIM905
WORDS = ["data.name", "data.language", "output.name", "output.cutoffs", "optim.schedule", "optim.embedding"]
"""Settings shown as hyperparameters."""
SHOWN_FIRST = ("data.name", "model.hidden_size", "optim.lr", "output.name", "seed")
"""Hyperparameters shown by default."""
METRICS = [drawn_as(tag) for tag in ("valid/ppl", "test/ppl", "speed/tokens_per_s", "memory/peak_gib")]


class Events:
    """A run's event file."""

    def __init__(self, folder: Path, *, settings: Mapping[str, Any], began: float) -> None:
        """`settings` are by dotted key; `began` is when the run first started, in seconds since 1970."""
        self._last_second = -1
        self._hook = threading.excepthook
        threading.excepthook = self._ignore_io_errors
        # With purge_step a running TensorBoard discards events from before a resume.
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self._writer.add_custom_scalars(LAYOUT)
        self._describe_hparams()
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=began)
        for key in NUMBERS:
            if (value := settings.get(key)) is not None:
                start.hparams[key].number_value = value
        for key in WORDS:
            if (value := settings.get(key)) is not None:
                start.hparams[key].string_value = typed(value)
        self._add_hparams(metadata.SESSION_START_INFO_TAG, session_start_info=start)

    def draw(self, record: Mapping[str, Any]) -> None:
        """Add a record's metrics at its step and time."""
        for tag, value in record.items():
            if "/" in tag and value is not None:
                self._writer.add_scalar(drawn_as(tag), value, record["step"], walltime=record["time"])
        if record.get("valid/ppl") is not None:
            # The steps of this chart are seconds; evaluations within one second are moved apart.
            self._last_second = max(self._last_second + 1, round(record["train_seconds"]))
            self._writer.add_scalar(BY_SECOND, record["valid/ppl"], self._last_second, walltime=record["time"])

    def finish(self) -> None:
        """Mark the run as finished."""
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        self._add_hparams(metadata.SESSION_END_INFO_TAG, session_end_info=end)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._hook

    def _ignore_io_errors(self, error: threading.ExceptHookArgs) -> None:
        """Do not print I/O errors of the writer's thread: its next call raises them again."""
        if not isinstance(error.exc_value, OSError) or "Writer" not in type(error.thread).__name__:
            self._hook(error)

    def _describe_hparams(self) -> None:
        types = {api_pb2.DATA_TYPE_FLOAT64: NUMBERS, api_pb2.DATA_TYPE_STRING: WORDS}
        experiment = api_pb2.Experiment(
            hparam_infos=[
                api_pb2.HParamInfo(name=key, type=kind, differs=key in SHOWN_FIRST)
                for kind, keys in types.items()
                for key in keys
            ],
            metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in METRICS],
        )
        self._add_hparams(metadata.EXPERIMENT_TAG, experiment=experiment)

    def _add_hparams(self, tag: str, **content: Any) -> None:
        data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
        plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
        value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=metadata.NULL_TENSOR)
        writer: Any = self._writer  # torch declares file_writer as None
        writer.file_writer.add_summary(Summary(value=[value]))
