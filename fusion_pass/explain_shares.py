"""Where a model's work lies: in the fused chains, and outside of them by part. For the text and the HTML page."""

from __future__ import annotations

from collections.abc import Iterable

from .details import GraphDetail
from .parts import PARTS

_TITLES = {"chains": "fused chains", "indexer": "indexer", "compressor": "compressor", "experts": "experts",
           "other": "everything else"}

STYLE = """
:root { --p-chains: #0b7a53; --p-indexer: #3457b1; --p-compressor: #7d4bb0; --p-experts: #b5651d; --p-other: #98a1b0; }
@media (prefers-color-scheme: dark) { :root { --p-chains: #5fd3a4; --p-indexer: #8fadf5; --p-compressor: #c6a1ee;
  --p-experts: #eab676; --p-other: #5f6b7d; } }
.shares { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 8px 16px; align-items: center;
  margin-bottom: 12px; }
.shares .bar { display: flex; height: 18px; border-radius: 4px; overflow: hidden; background: var(--code); }
.shares .bar i { display: block; } .key { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 8px; vertical-align: -1px; }
"""


def shares(graphs: Iterable[GraphDetail]) -> dict[str, tuple[float, float]]:
    """Shares of (floating-point operations, memory traffic) of all graphs together, by ``"chains"`` and part."""
    graphs = list(graphs)
    flops, traffic = sum(graph.total.flops for graph in graphs), sum(graph.total.bytes for graph in graphs)
    found = dict.fromkeys(("chains", *PARTS), (0.0, 0.0))
    for graph in graphs:
        weights = (graph.total.flops / flops if flops else 0.0, graph.total.bytes / traffic if traffic else 0.0)
        inside = (1 - graph.share_of_flops_outside, 1 - graph.share_of_bytes_outside)
        for part, share in {"chains": inside, **graph.shares_outside()}.items():
            have = found[part]
            found[part] = (have[0] + weights[0] * share[0], have[1] + weights[1] * share[1])
    return found


def words(graph: GraphDetail, column: int) -> str:
    """``"indexer 2%, experts 40%, other 3%"``: the parts outside of one graph's chains; column 0: floating-point
    operations, 1: traffic. Empty when there is nothing outside."""
    named = ((part, values[column]) for part, values in graph.shares_outside().items())
    return ", ".join(f"{part} {percent(value)}" for part, value in named if value > 0)


def percent(share: float) -> str:
    """Whole percents; what is there and rounds to nothing is ``<1%``."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def html(graphs: Iterable[GraphDetail]) -> str:
    """Two bars (operations, traffic) and a table of the same numbers."""
    found = shares(graphs)
    bars, rows = [], []
    for column, title in enumerate(("FLOPs", "traffic")):
        pieces = "".join(f'<i style="width:{values[column]:.2%};background:var(--p-{part})" title="{_TITLES[part]} '
                         f'{percent(values[column])}"></i>' for part, values in found.items() if values[column] > 0)
        label = ", ".join(f"{_TITLES[part]} {percent(values[column])}" for part, values in found.items())
        bars.append(f'<span class="soft small">{title}</span><div class="bar" role="img" '
                    f'aria-label="{title}: {label}">{pieces}</div>')
    for part, (flops, traffic) in found.items():
        rows.append(f'<tr><td><span class="key" style="background:var(--p-{part})"></span>{_TITLES[part]}</td>'
                    f"<td>{percent(flops)}</td><td>{percent(traffic)}</td></tr>")
    return ('<div class="card"><div class="shares">' + "".join(bars) + '</div><div class="wide"><table><thead><tr>'
            "<th>part of the model</th><th>FLOPs</th><th>traffic</th></tr></thead><tbody>"
            + "".join(rows) + "</tbody></table></div></div>"
            '<p class="soft small">Parts are told by the module (without modules, by the source line) that an operator '
            "came from. Projections, norms, residual streams and what is unknown are everything else; routers belong "
            "to the experts.</p>")
