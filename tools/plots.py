"""Draw docs/plots/*.svg from the committed results (benchmarks/results/*.json); needs matplotlib.

    python tools/plots.py            draw all

Each file names the digest of the results that it was drawn from (:func:`digest`); a test compares it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "plots"
LINES = ("attention", "bgemm")  # times over tokens
RATIOS = "chain"
HEADS = {"pro": "128 heads (Pro)", "flash": "64 heads (Flash)"}
CACHES = {"bf16": ("bf16 keys", "#2b6cb0"), "FP8": ("FP8 keys", "#dd6b20")}


def digest(name: str) -> str:
    """What a plot of ``benchmarks/results/NAME.json`` must have been drawn from."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    kept = [(row.get("shape"), row.get("T"), row.get("variant"), row.get("us")) for row in rows]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """{shape: {cache: [(tokens, the peers' time / ours over the same kind of cache)]}}, both with their own product."""
    us = {(row["shape"], row["T"], row["variant"]): row["us"] for row in rows}
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for shape, tokens, variant in us:
        for cache in CACHES:
            if variant == f"fusion_pass, {cache} KV" and (peers := us.get((shape, tokens, f"peers, {cache} KV"))):
                point = (tokens, peers / us[shape, tokens, variant])
                found.setdefault(shape, {}).setdefault(cache, []).append(point)
    return found


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fusion_pass", "font.family": "sans-serif"}
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, name: str) -> None:
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{name}.svg"
    figure.savefig(path, facecolor="white", metadata={"Date": None, "Description": f"{name}.json {digest(name)}"})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def draw_ratios(name: str) -> None:
    """Bars: how many times as long the peers' chain takes."""
    plt = _pyplot()
    made = json.loads((RESULTS / f"{name}.json").read_text())
    found = ratios(made["rows"])
    widths = [len({t for points in caches.values() for t, _ in points}) for caches in found.values()]
    figure, axes = plt.subplots(
        1, len(found), figsize=(11, 3.6), width_ratios=widths, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (shape, caches) in zip(axes[0], found.items()):
        tokens = sorted({t for points in caches.values() for t, _ in points})
        for side, (cache, points) in zip((-0.2, 0.2), caches.items()):
            label, colour = CACHES[cache]
            bars = axis.bar([tokens.index(t) + side for t, _ in points], [r for _, r in points], 0.38,
                            color=colour, label=label)
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(tokens)), [f"{t:,}" for t in tokens])
        axis.set(title=HEADS.get(shape, shape), xlabel="tokens")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time of the peers' chain / ours")
    axes[0][0].legend(frameon=False, loc="upper right")
    figure.suptitle(f"Attention, inverse RoPE, FP8 quantisation, grouped product: {made['environment']['gpu']}")
    _save(figure, name)
    plt.close(figure)


def draw_lines(name: str) -> None:
    """Microseconds over tokens, a line per variant."""
    plt = _pyplot()
    made = json.loads((RESULTS / f"{name}.json").read_text())
    shapes = list(dict.fromkeys(row["shape"] for row in made["rows"]))
    figure, axes = plt.subplots(1, len(shapes), figsize=(11, 4), squeeze=False, layout="constrained")
    for axis, shape in zip(axes[0], shapes):
        rows = [row for row in made["rows"] if row["shape"] == shape and row.get("us")]
        for variant in dict.fromkeys(row["variant"] for row in rows):
            points = sorted((row["T"], row["us"]) for row in rows if row["variant"] == variant)
            style = "-" if variant.startswith("fusion_pass") else "--"
            axis.plot(*zip(*points), style, marker="o", markersize=3, label=variant)
        axis.set(title=HEADS.get(shape, shape), xlabel="tokens", ylabel="microseconds", xscale="log", yscale="log")
        axis.grid(True, which="major", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{name}: {made['environment']['gpu']}")
    _save(figure, name)
    plt.close(figure)


def main() -> int:
    draw_ratios(RATIOS)
    for name in LINES:
        draw_lines(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
