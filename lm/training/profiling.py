"""`trainer.profile=true`: trace a few steps and list the slowest operations."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lm.system.console import say
from lm.system.files import put_in_place

SKIPPED, WARM_UP, TRACED = 3, 2, 5
"""Number of steps before the trace, for warm-up, and in the trace."""
ROWS = 10
TRACE = "steps.pt.trace.json"
"""The name that TensorBoard's profiler plug-in expects."""


class StepProfiler(profile):
    """Traces a few steps into a folder; call `step` after each training step."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        steps = schedule(wait=SKIPPED, warmup=WARM_UP, active=TRACED, repeat=1)
        super().__init__(activities=kinds, schedule=steps, on_trace_ready=self._write)
        self.path, self._sort_by = folder / TRACE, f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        self._written = False

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not self._written:
            say(f"No trace was written: it needs {SKIPPED + WARM_UP + TRACED} steps, and the run was shorter.")

    def _write(self, _traced: profile) -> None:
        partial = self.path.with_name(f".{self.path.name}.partial")
        self.export_chrome_trace(str(partial))
        put_in_place(partial, self.path)
        self._written = True
        say(self.key_averages().table(self._sort_by, row_limit=ROWS, max_name_column_width=40))
        say(f"The trace is in {self.path}; open it with https://ui.perfetto.dev or chrome://tracing")
