"""`what=layers`: time and memory of every output layer's training step.

"x full", "x torch" and "x plain": how many times faster the layer is than the full softmax, than torch's adaptive
module and than its own plain PyTorch form. "products": the share of the time that its matrix products alone take.
"extra": peak memory above the weights and their gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lm.benchmark.arguments import CountsSettings, fill, read_numbers
from lm.benchmark.candidates import (
    PLAIN,
    TORCH_ADAPTIVE,
    Workload,
    bare_products,
    has_plain_form,
    layer_names,
    prepare,
)
from lm.benchmark.measure import MIB, STEP, Row, Step, extra_peak_bytes, interleaved_medians, row, write_rows
from lm.system.console import say, table
from lm.system.errors import UserError


@dataclass
class LayersSettings(CountsSettings):
    """Keys of `what=layers`."""

    classes: str = ""
    """A file with the Brown class of each word, one per line, for `hsm_sim`; classes of equal size by default."""
    layers: list[str] = field(default_factory=lambda: list(layer_names()))
    tokens: int = 2560
    """Tokens per step: the paper's 128 streams of 20."""
    repeats: int = 7
    threads: int = 1
    memory: bool = True


def main(pairs: dict[str, str]) -> None:
    settings = fill(LayersSettings, pairs)
    known = layer_names()
    if unknown := [name for name in settings.layers if name not in known]:
        raise UserError(f"layers must be of {', '.join(known)}; got {unknown[0]!r}. Try layers=full,adaptive")
    counts = settings.read_counts()
    classes = read_numbers("classes", settings.classes) if settings.classes else None
    workload = Workload(counts, settings.cutoffs, settings.width, settings.tokens, classes)
    torch.set_num_threads(settings.threads)
    names = list(candidates(settings.layers))
    steps: dict[str, Step] = {}
    for name in names:
        steps[name] = prepare(name, workload)[STEP]
        if name in settings.layers:
            steps[f"{name}/products"] = bare_products(name, workload).replay()
    seconds = interleaved_medians(steps, repeats=settings.repeats)
    peaks = {name: extra_peak_bytes(prepare, name, workload) for name in names} if settings.memory else {}
    print_table(names, seconds, peaks, workload)
    write_rows(report(names, seconds, peaks, vocab_size=len(counts)), settings.out)


def candidates(layers: list[str]) -> Iterator[str]:
    """The layers, each followed by its plain form if it has one, and torch's own adaptive softmax."""
    for name in layers:
        yield name
        if has_plain_form(name):
            yield name + PLAIN
    if "adaptive" in layers:
        yield TORCH_ADAPTIVE


def print_table(names: list[str], seconds: dict[str, float], peaks: dict[str, int | None], workload: Workload) -> None:
    say(
        f"{len(workload.counts)} words, {workload.tokens} tokens, width {workload.width}, cutoffs {workload.cutoffs}; "
        "forward and backward, medians"
    )
    rows = []
    for name in names:
        ratios = [_ratio(seconds, rival, name) for rival in ("full", TORCH_ADAPTIVE, name + PLAIN)]
        share, peak = _ratio(seconds, f"{name}/products", name), peaks.get(name)
        cells = [name, f"{1e3 * seconds[name]:.1f}", *(f"{r:.2f}" if r else "-" for r in ratios)]
        rows.append([*cells, f"{share:.0%}" if share else "-", f"{peak / MIB:.0f}" if peak is not None else "-"])
    say(table(rows, header=["layer", "ms", "x full", "x torch", "x plain", "products", "extra MiB"]))


def report(
    names: list[str], seconds: dict[str, float], peaks: dict[str, int | None], *, vocab_size: int
) -> Iterator[Row]:
    """`ratio`: how many times faster (or smaller) than what the name says; for products, their share of the time."""
    for name in names:
        base, plain = f"layers/{vocab_size}/{name}", name + PLAIN
        yield row(f"{base}/time", 1e3 * seconds[name], "ms")
        rivals = {"speed_against_full": "full", f"speed_against_{TORCH_ADAPTIVE}": TORCH_ADAPTIVE}
        rivals |= {"speed_against_plain": plain, "share_of_products": f"{name}/products"}
        for label, rival in rivals.items():
            if rival != name and (ratio := _ratio(seconds, rival, name)):
                yield row(f"{base}/{label}", 1e3 * seconds[rival], "ms", ratio)
        if (peak := peaks.get(name)) is not None:
            rival_peak = peaks.get(TORCH_ADAPTIVE if name == "adaptive" else plain)
            yield row(f"{base}/extra_peak_memory", peak / MIB, "MiB", peak / rival_peak if rival_peak else None)


def _ratio(seconds: dict[str, float], numerator: str, denominator: str) -> float | None:
    return seconds[numerator] / seconds[denominator] if numerator in seconds else None
