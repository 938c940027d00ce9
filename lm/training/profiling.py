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


class StepProfiler:
    """Context manager that traces a few steps; call `step` after each training step."""

    def __init__(self, folder: Path, device: torch.device, *, enabled: bool = True) -> None:
        self.path = folder / TRACE
        self._on_gpu = device.type == "cuda"
        self._steps_left = SKIPPED + WARM_UP + TRACED if enabled else 0
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else []),
            schedule=schedule(wait=SKIPPED, warmup=WARM_UP, active=TRACED, repeat=1),
        )

    def step(self) -> None:
        """Count a step; after the last traced one, write the trace and print a table."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        self._profile.step()
        if not self._steps_left:
            self._profile.stop()
            self._write()
            say(self._report())

    def __enter__(self) -> "StepProfiler":
        if self._steps_left:
            self._profile.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._steps_left:
            self._profile.stop()
            say(f"No trace was written: it needs {SKIPPED + WARM_UP + TRACED} steps, and the run was shorter.")

    def _write(self) -> None:
        partial = self.path.with_name(f".{self.path.name}.partial")
        self._profile.export_chrome_trace(str(partial))
        put_in_place(partial, self.path)

    def _report(self) -> str:
        kind = "device" if self._on_gpu else "cpu"
        averages = self._profile.key_averages()
        return (
            f"{averages.table(f'self_{kind}_time_total', row_limit=ROWS, max_name_column_width=40)}\n"
            f"A trace of {TRACED} steps is in {self.path}; open it with https://ui.perfetto.dev or chrome://tracing"
        )
