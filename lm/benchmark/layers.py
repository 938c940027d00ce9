"""`what=layers`: time and memory of every output layer's training step, against torch and against bare products.

"x full", "x torch" and "x plain" say how many times as fast as the full softmax, as torch's adaptive module and as the
layer's plain form a layer is; "products" is the share of its time that its bare matrix products take; "extra" is the
peak of memory on top of the weights and their gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lm.benchmark.candidates import LAYERS, PLAIN, TORCH_ADAPTIVE, Workload, bare_products, prepare
from lm.benchmark.counts import CountsSettings, read_numbers
from lm.benchmark.measure import Step, extra_peak_bytes, interleaved_medians
from lm.benchmark.rows import Row, write_rows
from lm.output.clusters.partition import check_cutoffs
from lm.system.console import table
from lm.system.errors import UserError

MIB = 1 << 20


@dataclass
class LayersSettings(CountsSettings):
    """Keys of `what=layers`."""

    cutoffs: list[int] = field(default_factory=lambda: [2000, 10_000])
    classes: str = ""
    """A file with the Brown class of each word, one per line, for `hsm_sim`; equal classes if left out."""
    layers: list[str] = field(default_factory=lambda: list(LAYERS))
    width: int = 512
    tokens: int = 2560
    """Tokens of a step: the paper's 128 streams of 20."""
    repeats: int = 7
    threads: int = 1
    memory: bool = True
    out: str = "benchmark.json"


def run_layers(settings: LayersSettings) -> None:
    """Measure, print, write."""
    counts = settings.read_counts()
    unknown = [name for name in settings.layers if name not in LAYERS]
    if unknown:
        raise UserError(f"layers must be of {', '.join(LAYERS)}; got {unknown[0]!r}. Try layers=full,adaptive")
    cutoffs = check_cutoffs(settings.cutoffs, vocab_size=len(counts))
    classes = read_numbers("classes", settings.classes) if settings.classes else None
    workload = Workload(counts, cutoffs, settings.width, settings.tokens, classes)
    torch.set_num_threads(settings.threads)
    names = list(candidates(settings.layers))
    seconds = time_all(names, settings.layers, workload, repeats=settings.repeats)
    peaks = {name: extra_peak_bytes(prepare, name, workload) for name in names} if settings.memory else {}
    print_table(names, seconds, peaks, workload)
    write_rows(report(names, seconds, peaks, vocab_size=len(counts)), settings.out)


def candidates(layers: list[str]) -> Iterator[str]:
    """The layers, each followed by its plain form."""
    for name in layers:
        yield name
        if name in PLAIN:
            yield PLAIN[name]
    if "adaptive" in layers:
        yield TORCH_ADAPTIVE


def time_all(names: list[str], layers: list[str], workload: Workload, *, repeats: int) -> dict[str, float]:
    """Median seconds of every candidate's step and, as `NAME/products`, of each layer's bare products."""
    steps: dict[str, Step] = {}
    for name in names:
        steps[name] = prepare(name, workload)[1]
        if name in layers:
            steps[f"{name}/products"] = bare_products(name, workload)
    return interleaved_medians(steps, repeats=repeats)


def print_table(names: list[str], seconds: dict[str, float], peaks: dict[str, int | None], workload: Workload) -> None:
    """One line per candidate; a dash where there is nothing to compare with."""
    print(
        f"{len(workload.counts)} words, {workload.tokens} tokens, width {workload.width}, cutoffs {workload.cutoffs}; "
        "forward and backward, medians"
    )
    rows = []
    for name in names:
        against = [_ratio(seconds, rival, name) for rival in ("full", TORCH_ADAPTIVE, PLAIN.get(name, ""))]
        share = _ratio(seconds, f"{name}/products", name)
        peak = peaks.get(name)
        cells = [name, f"{1e3 * seconds[name]:.1f}", *(f"{r:.2f}" if r else "-" for r in against)]
        rows.append([*cells, f"{share:.0%}" if share else "-", f"{peak / MIB:.0f}" if peak is not None else "-"])
    print(table(rows, header=["layer", "ms", "x full", "x torch", "x plain", "products", "extra MiB"]))


def report(
    names: list[str], seconds: dict[str, float], peaks: dict[str, int | None], *, vocab_size: int
) -> Iterator[Row]:
    """The same as records; `ratio` says how many times as fast (or as small) as what the name says."""
    for name in names:
        base = f"layers/{vocab_size}/{name}"
        yield {"name": f"{base}/time", "value": 1e3 * seconds[name], "unit": "ms", "ratio": None}
        for label, rival in (("full", "full"), (TORCH_ADAPTIVE, TORCH_ADAPTIVE), ("plain", PLAIN.get(name, ""))):
            ratio = _ratio(seconds, rival, name)
            if ratio and rival != name:
                value = 1e3 * seconds[rival]
                yield {"name": f"{base}/speed_against_{label}", "value": value, "unit": "ms", "ratio": ratio}
        share = _ratio(seconds, f"{name}/products", name)
        if share:
            value = 1e3 * seconds[f"{name}/products"]
            yield {"name": f"{base}/share_of_products", "value": value, "unit": "ms", "ratio": share}
        peak, rival = peaks.get(name), PLAIN.get(name, TORCH_ADAPTIVE if name == "adaptive" else "")
        if peak is not None:
            ratio = peak / rival_peak if (rival_peak := peaks.get(rival)) else None
            yield {"name": f"{base}/extra_peak_memory", "value": peak / MIB, "unit": "MiB", "ratio": ratio}


def _ratio(seconds: dict[str, float], numerator: str, denominator: str) -> float | None:
    return seconds[numerator] / seconds[denominator] if numerator in seconds else None
