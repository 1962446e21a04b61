"""What every benchmark shares: CUDA-graph timing, roofline accounting, and the results' JSON, table and plot.

Method. A variant is a list of calls that do the same work on *different* inputs (rotating weights, caches and queries,
so that no call finds its inputs in the L2 cache because the call before it used them). All calls of a variant go into
one CUDA graph; one replay is one sample, divided by the number of calls. A table row's variants are replayed in turn,
so that a drift of the clocks or of the power limit hits all of them; the medians are reported with the 10th and 90th
percentiles, and ratios are medians of the per-round ratios.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA_VERSION = 1
Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: median, 10th and 90th percentile over `samples` graph replays."""

    us: float
    p10: float
    p90: float
    samples: int
    raw: tuple[float, ...] = field(repr=False, default=())

    def row(self) -> dict[str, Any]:
        return {
            "us": round(self.us, 3),
            "p10": round(self.p10, 3),
            "p90": round(self.p90, 3),
            "samples": self.samples,
        }


def _summary(samples: Sequence[float]) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered),
        ordered[round(0.1 * last)],
        ordered[round(0.9 * last)],
        len(ordered),
        tuple(samples),
    )


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Run every call once (compilation, lazy initialisation), then capture all of them into one CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_interleaved(
    variants: Mapping[str, Sequence[Call]], *, replays: int = 21, warmup: int = 2, min_us: float = 0.0
) -> dict[str, Timing]:
    """Time several variants in turn, one graph replay each per round. Keys of the result are those of `variants`.

    `min_us`: replay a variant's graph several times per sample until one sample is expected to last that long
    (microseconds); short graphs need it because an event pair costs about a microsecond itself.
    """
    graphs = {name: capture(calls) for name, calls in variants.items()}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    repeat = dict.fromkeys(graphs, 1)
    for round_ in range(warmup + replays):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            start.record()
            for _ in range(repeat[name]):
                graph.replay()
            end.record()
            end.synchronize()
            total = start.elapsed_time(end) * 1e3
            per_call = total / repeat[name] / len(variants[name])
            if round_ < warmup:
                repeat[name] = max(1, math.ceil(min_us / max(total / repeat[name], 1e-3)))
            else:
                samples[name].append(per_call)
    return {name: _summary(values) for name, values in samples.items()}


def time_graph(calls: Sequence[Call], *, replays: int = 21, warmup: int = 2, min_us: float = 0.0) -> Timing:
    """Time one variant; see :func:`time_interleaved`."""
    return time_interleaved({"only": calls}, replays=replays, warmup=warmup, min_us=min_us)["only"]


def ratio(base: Timing, ours: Timing) -> float:
    """Median over rounds of base / ours: above 1 means ours is faster. Both must come from one interleaved run."""
    return statistics.median(b / o for b, o in zip(base.raw, ours.raw, strict=True))


def ceilings() -> dict[str, float]:
    """Measured ceilings of this GPU: copy bandwidth (bytes read + written per second) and dense bf16 FLOP/s."""
    size = 1 << 30  # many times the L2 cache; several processes may do this at once, to compile what others time
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = time_graph([partial(target.copy_, source)], replays=9).us
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = time_graph([partial(torch.matmul, a, b)], replays=9).us
    del source, target, a, b
    free()
    return {"bytes_per_s": 2 * size / copy * 1e6, "bf16_flop_per_s": 2 * 8192**3 / matmul * 1e6}


def roofline(us: float, *, nbytes: float, flops: float, peaks: Mapping[str, float], flop_scale: float = 1.0) -> float:
    """Fraction of the roofline: (larger of bytes / bandwidth and FLOPs / rate) / measured time.

    `flop_scale` is the FLOP rate relative to dense bf16 (2 for FP8 tensor cores).
    """
    floor = max(nbytes / peaks["bytes_per_s"], flops / (peaks["bf16_flop_per_s"] * flop_scale)) * 1e6
    return floor / us


def norm_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN and infinity anywhere in `out` give infinity."""
    out = out.double()
    if not bool(torch.isfinite(out).all()):
        return math.inf
    return float((out - reference.double()).norm() / reference.double().norm())


def kernels_state() -> str:
    """The first digits of a hash over the sources of the kernels: results with the same one are of the same kernels."""
    import fusion_pass.kernels

    digest = hashlib.sha256()
    for folder in fusion_pass.kernels.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def environment() -> dict[str, Any]:
    """Versions, GPU, driver and kernels that a result belongs to."""
    info: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernels": kernels_state(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "transformers", "sgl-flash-mla", "tokenspeed-deepgemm"):
        try:
            info[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            info[name] = None
    vllm = sys.modules.get("vllm")  # timed from an installation or from its source file alone
    info["vllm"] = None if vllm is None else str(getattr(vllm, "__version__", "unknown"))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        info |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return info


def free() -> None:
    """Return a finished row's memory to the device (CUDA graphs keep their pools alive until collected)."""
    gc.collect()
    torch.cuda.empty_cache()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every benchmark takes."""
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="token counts, instead of the table's own")
    parser.add_argument("--layers", type=int, nargs="+", default=None, help="layer counts of compile_time")
    parser.add_argument("--shapes", nargs="+", default=["pro", "flash"], choices=["pro", "flash"], help="model shapes")
    parser.add_argument("--replays", type=int, default=21, help="graph replays per variant")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out even when they are importable")
    parser.add_argument("--no-torch", action="store_true", help="chain: leave out torch's own operations and Inductor")
    parser.add_argument("--no-plot", action="store_true", help="write no plots")
    parser.add_argument("--seed", type=int, default=None, help="random seed; default: fresh data at every run")
    parser.add_argument(
        "--go",
        type=Path,
        default=None,
        metavar="FILE",
        help="model, decode_graphs: write FILE.ready when everything is compiled, and begin to time when FILE exists",
    )
    parser.add_argument("--profile", action="store_true", help="decode_graphs: kernels of a graph by category")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON results and plots")


def write_results(name: str, rows: Sequence[Mapping[str, Any]], output: Path, **extra: Any) -> Path:
    """Write `rows` with the environment as `output/name.json` and return the path."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.json"
    body = {"schema_version": SCHEMA_VERSION, "benchmark": name, "environment": environment(), **extra}
    path.write_text(json.dumps({**body, "rows": list(rows)}, indent=1) + "\n")
    return path


def print_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print rows as a rich table; floats get three significant places after the point at most."""
    from rich.console import Console
    from rich.table import Table

    columns = list(columns or dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if any(isinstance(r.get(column), float) for r in rows) else "left")
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        table.add_row(*(f"{c:.3g}" if isinstance(c, float) and abs(c) < 100 else str(c) for c in cells))
    Console(width=160).print(table)


def plot(name: str, rows: Sequence[Mapping[str, Any]], output: Path) -> Path | None:
    """Time over tokens, one line per variant and one panel per shape; None where matplotlib is missing.

    Uses the keys ``shape``, ``T``, ``variant`` and ``us`` of the rows; rows without them are left out.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    usable = [row for row in rows if {"shape", "T", "variant", "us"} <= row.keys() and row["us"]]
    shapes = list(dict.fromkeys(row["shape"] for row in usable))
    if not shapes:
        return None
    figure, axes = plt.subplots(1, len(shapes), figsize=(6 * len(shapes), 4.5), squeeze=False, layout="constrained")
    for axis, shape in zip(axes[0], shapes):
        for variant in dict.fromkeys(row["variant"] for row in usable if row["shape"] == shape):
            points = sorted((r["T"], r["us"]) for r in usable if r["shape"] == shape and r["variant"] == variant)
            axis.plot([t for t, _ in points], [us for _, us in points], marker="o", label=variant)
        axis.set(title=f"{name}: {shape}", xlabel="tokens", ylabel="microseconds", xscale="log", yscale="log")
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(fontsize=8)
    path = output / f"{name}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
