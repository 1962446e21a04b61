"""A report as one self-contained HTML page: no scripts, no fonts, nothing loaded from anywhere."""

from __future__ import annotations

import html
import linecache
from pathlib import Path

from . import explain_shares
from .advice import advice
from .details import ChainDetail, Cost, GraphDetail
from .report import FusedChain, GatedChain, NearMiss, Report
from .version import __version__

_TITLES = {"fmha": "attention", "kv_merge": "KV merge", "inverse_rope": "inverse RoPE", "fp8_quant": "FP8 quant",
           "bgemm": "grouped GEMM"}
_OPERANDS = {"fmha": "q, kv, mask, sink", "kv_merge": "partials, lse", "inverse_rope": "cos, sin", "fp8_quant": "",
             "bgemm": "weight"}

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2230; --soft: #5a6474; --line: #d9dee6;
  --code: #f1f3f6; --good: #0b7a53; --good-back: #e3f5ed; --warn: #8a5a00; --warn-back: #fdf1d8; --info: #3457b1;
  --info-back: #e7edfb; }
@media (prefers-color-scheme: dark) { :root { --page: #11151c; --card: #191f29; --text: #e4e8ef; --soft: #9aa5b6;
  --line: #2f3947; --code: #11161e; --good: #5fd3a4; --good-back: #15352a; --warn: #f0c063; --warn-back: #3a2e14;
  --info: #9db7f5; --info-back: #1d2a47; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 4px; overflow-wrap: anywhere; } p { margin: 4px 0; }
.soft { color: var(--soft); } .small { font-size: .875rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 16px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.tile b { display: block; font-size: 1.5rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card { margin: 12px 0; border-left: 4px solid var(--line); }
.card.fused { border-left-color: var(--good); } .card.gated { border-left-color: var(--info); }
.card.miss { border-left-color: var(--warn); }
.tag { display: inline-block; border-radius: 4px; padding: 0 8px; font-size: .8125rem; font-weight: 600;
  margin-right: 8px; }
.fused .tag { background: var(--good-back); color: var(--good); }
.gated .tag { background: var(--info-back); color: var(--info); }
.miss .tag { background: var(--warn-back); color: var(--warn); }
code, pre { font: .8125rem/1.5 ui-monospace, monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 6px; padding: 12px; margin: 8px 0;
  overflow-x: auto; max-height: 28rem; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 16px; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 16px; margin: 8px 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); }
.fix { background: var(--warn-back); border-radius: 6px; padding: 8px 12px; margin-top: 8px; }
.gated .fix { background: var(--info-back); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 12px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { color: var(--soft); font-weight: 600; }
svg { display: block; margin: 8px 0; max-width: 100%; height: auto; } svg.column { display: none; }
svg text { font: 13px system-ui, sans-serif; fill: var(--text); text-anchor: middle; }
svg text.note { font-size: 11px; fill: var(--soft); } svg text.op { fill: var(--good); font-weight: 600; }
svg rect { fill: var(--card); stroke: var(--soft); } svg rect.op { fill: var(--good-back); stroke: var(--good); }
svg path { stroke: var(--soft); fill: none; stroke-width: 1.5; } svg path.head { fill: var(--soft); stroke: none; }
@media (max-width: 720px) { .pair { grid-template-columns: minmax(0, 1fr); gap: 0; } svg.row { display: none; }
  svg.column { display: block; } dl { grid-template-columns: minmax(0, 1fr); gap: 0; } dd { margin-bottom: 8px; }
  .stacked thead { display: none; }
  .stacked tr { display: block; padding: 4px 0; border-bottom: 1px solid var(--line); }
  .stacked td { display: flex; justify-content: space-between; border: 0; padding: 0; }
  .stacked td::before { content: attr(data-name); color: var(--soft); } }
"""


def page(report: Report, title: str = "fusion_pass report") -> str:
    """The report as the text of an HTML page. Sub-graphs and estimates stand there when ``report.details`` has them
    (``fusion_pass.explain`` fills it)."""
    details = {chain.index: chain for graph in report.details for chain in graph.chains}
    parts = [_tiles(report)]
    if report.fused:
        parts.append("<h2>Fused</h2>")
        parts += [_fused(chain, details.get(first), many) for chain, first, many in _alike(report, details)]
    if report.near_misses:
        parts.append("<h2>Near misses</h2>")
        parts += map(_near_miss, report.near_misses)
    if report.gated:
        parts.append("<h2>Left alone</h2>")
        parts += map(_gated, report.gated)
    if not report:
        parts.append('<div class="card"><p>Nothing in this model is a chain of the kind that this pass fuses: the '
                     "graph is compiled as it is.</p></div>")
    if report.details:
        parts += ["<h2>Where the work lies</h2>", explain_shares.html(report.details)]
        parts += ["<h2>Graphs</h2>", _graphs(report.details)]
    if report.notes:
        parts += ["<h2>Notes</h2>", *(f"<p>{_text(note)}</p>" for note in report.notes)]
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>{_text(title)}</title>'
            f"<style>{_STYLE}{explain_shares.STYLE}</style></head>"
            f'<body><main><h1>{_breakable(title)}</h1><p class="soft small">fusion_pass {_text(__version__)}: '
            f"{_text(report.summary())}</p>{''.join(parts)}</main></body></html>\n")


def _text(value: object) -> str:
    return html.escape(str(value))


def _breakable(title: str) -> str:
    """A title or path that may be broken behind slashes and colons."""
    return _text(title).replace("/", "/<wbr>").replace(":", ":<wbr>")


def _tiles(report: Report) -> str:
    tiles = [(str(len(report.fused)), "fused"), (str(len(report.near_misses)), "near misses"),
             (str(len(report.gated)), "left alone")]
    chains = [chain for graph in report.details for chain in graph.chains]
    if chains:
        low = sum(c.cost_before.least - c.cost_after.least for c in chains)
        high = sum(c.cost_before.most - c.cost_after.most for c in chains)
        saved = sum(c.cost_before.bytes - c.cost_after.bytes for c in chains)
        tiles += [(_range(low, high), "kernel launches saved (estimate)"),
                  (_bytes(saved), "memory traffic saved (estimate)")]
    return ('<div class="tiles">'
            + "".join(f'<div class="tile"><b>{_text(v)}</b><span class="soft small">{n}</span></div>' for v, n in tiles)
            + "</div>")


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _bytes(count: int) -> str:
    size, sign = float(abs(count)), "-" if count < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{sign}{size:.0f} {unit}" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _flops(count: int) -> str:
    value = float(count)
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {unit}FLOP"
        value /= 1000
    return f"{value:.3g} TFLOP"


def _where(where: str) -> str:
    if not where:
        return '<p class="soft small">source line unknown</p>'
    path, _, number = where.rpartition(":")
    code = linecache.getline(path, int(number)).strip() if number.isdigit() and Path(path).is_file() else ""
    return f"<p><code>{_breakable(where)}</code></p>" + (f"<pre>{_text(code)}</pre>" if code else "")


def _facts(rows: list[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value) + "</dl>"


def _alike(report: Report, details: dict[int, ChainDetail]) -> list[tuple[FusedChain, int, int]]:
    """(chain, index, how many): the layers of a model are mostly alike, and one card stands for all of them."""
    groups: dict[object, list[int]] = {}
    for i, chain in enumerate(report.fused):
        costs = (details[i].cost_before, details[i].cost_after) if i in details else ()
        shown = tuple((_launches(cost), _bytes(cost.bytes)) for cost in costs)
        groups.setdefault((chain, shown), []).append(i)
    return [(report.fused[found[0]], found[0], len(found)) for found in groups.values()]


def _fused(chain: FusedChain, detail: ChainDetail | None, many: int = 1) -> str:
    quant = f"{_text(chain.quant)} scales, 1 x {_text(chain.group)}" if chain.quant else ""
    rows = [("now", f"<code>{_text(chain.op)}</code>"), ("quantisation", quant), ("gate", _text(chain.gate))]
    text, times = "", f' <span class="soft">({many} alike)</span>' if many > 1 else ""
    if detail is not None:
        rows += [("launches", _change(_launches(detail.cost_before), _launches(detail.cost_after))),
                 ("memory traffic", _change(_bytes(detail.cost_before.bytes), _bytes(detail.cost_after.bytes)))]
        text = ('<details><summary>Sub-graph before and after</summary><div class="pair">'
                f"{_listing('Before', detail.before)}{_listing('After', detail.after)}</div></details>")
    return (f'<section class="card fused"><h3><span class="tag">fused</span>{_roles(chain.roles)}{times}</h3>'
            f"{_where(chain.where)}{_pictures(chain)}{_facts(rows)}{text}</section>")


def _roles(roles: tuple[str, ...]) -> str:
    return " → ".join(_TITLES[role] for role in roles)


def _launches(cost: Cost) -> str:
    return _range(cost.least, cost.most)


def _change(before: str, after: str) -> str:
    return f"{before} before, {after} after"


def _listing(title: str, lines: list[str]) -> str:
    return (f'<div><p class="small soft">{title}: {len(lines)} nodes</p><pre tabindex="0">'
            + _text("\n".join(lines)) + "</pre></div>")


def _near_miss(miss: NearMiss) -> str:
    return (f'<section class="card miss"><h3><span class="tag">near miss</span>{_TITLES[miss.role]}</h3>'
            f"{_where(miss.where)}<p>{_text(miss.reason)}</p>"
            f'<p class="fix"><b>How to fix</b>: {_text(advice(miss))}</p></section>')


def _gated(chain: GatedChain) -> str:
    fix = advice(chain)
    return (f'<section class="card gated"><h3><span class="tag">left alone</span>{_roles(chain.roles)}</h3>'
            f"{_where(chain.where)}<p>{_text(chain.gate)}</p>"
            + (f'<p class="fix"><b>To change that</b>: {_text(fix)}</p>' if fix else "") + "</section>")


def _graphs(details: list[GraphDetail]) -> str:
    head = ("graph", "nodes before", "after", "chains", "FLOPs", "outside of chains", "traffic", "outside of chains")
    rows = []
    for number, graph in enumerate(details):
        cells = (number, graph.nodes_before, graph.nodes_after, len(graph.chains), _flops(graph.total.flops),
                 f"{graph.share_of_flops_outside:.0%}", _bytes(graph.total.bytes),
                 f"{graph.share_of_bytes_outside:.0%}")
        named = zip(("graph", "nodes before", "after", "chains", "FLOPs", "FLOPs outside of chains", "traffic",
                     "traffic outside of chains"), cells)
        rows.append("<tr>" + "".join(f'<td data-name="{name}">{_text(c)}</td>' for name, c in named) + "</tr>")
    return ('<div class="card wide"><table class="stacked"><thead><tr>' + "".join(f"<th>{h}</th>" for h in head)
            + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
            '<p class="soft small">Estimates from shapes alone. Launches: the smaller number merges all neighbouring '
            "pointwise operators and reductions, the larger counts every operator. Traffic: with that merging, every "
            "kernel reads its inputs and writes its results once. FLOPs: contractions only.</p>")


# ----------------------------------------------------------------------------------------------------------- pictures


def _pictures(chain: FusedChain) -> str:
    return _picture(chain, across=True) + _picture(chain, across=False)


def _picture(chain: FusedChain, *, across: bool) -> str:
    """The data's way through the roles: boxes, with the operands that join on the way; boxes of one op share a
    frame."""
    width, height, gap = 128, 36, 44
    step = width + gap if across else height + gap
    spans = _spans(chain)
    length = len(chain.roles) * step - gap
    shapes = []
    left, top = (12, 34) if across else (12, 30)
    for op, first, last in spans:
        reach = (last - first + 1) * step - gap
        x, y = (left + first * step, top) if across else (left, top + first * step)
        w, h = (reach, height) if across else (width, reach)
        shapes.append(f'<rect class="op" x="{x - 8}" y="{y - 8}" width="{w + 16}" height="{h + 16}" rx="8"/>')
        at = (x + w / 2, y + h + 24, "middle") if across else (x + w + 18, y + h / 2 + 4, "start")
        shapes.append(f'<text class="op" style="text-anchor:{at[2]}" x="{at[0]:g}" y="{at[1]:g}">{_text(op)}</text>')
    for i, role in enumerate(chain.roles):
        x, y = (left + i * step, top) if across else (left, top + i * step)
        shapes.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        shapes.append(f'<text x="{x + width / 2:g}" y="{y + height / 2 + 5:g}">{_TITLES[role]}</text>')
        if i:
            shapes.append(_arrow(x - gap, y + height / 2, x, y + height / 2) if across else
                          _arrow(x + width / 2, y - gap, x + width / 2, y))
        operands = _operands(chain, i)
        if operands:
            at = (x + width / 2, y - 18, "middle") if across else (x + width / 2 + 10, y - (14 if i else 16), "start")
            shapes.append(f'<text class="note" style="text-anchor:{at[2]}" x="{at[0]:g}" y="{at[1]:g}">{operands}'
                          "</text>")
    size = (length + 24, height + 70) if across else (360, length + 48)
    label = f"{_roles(chain.roles)}; replaced by {_text(chain.op)}"
    return (f'<svg class="{"row" if across else "column"}" role="img" aria-label="{label}" width="{size[0]}" '
            f'height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">{"".join(shapes)}</svg>')


def _operands(chain: FusedChain, i: int) -> str:
    role = chain.roles[i]
    if role == "kv_merge" and i:
        return ""
    if role == "inverse_rope" and not i:
        return "attention output, cos, sin"
    return _OPERANDS[role]


def _spans(chain: FusedChain) -> list[tuple[str, int, int]]:
    """Which op covers which roles: (op, first, last). The last op of two is the projection."""
    ops = [op.strip().removeprefix("fusion_pass.") for op in chain.op.split("+")]
    end = len(chain.roles) - 1
    if len(ops) > 1:
        return [(ops[0], 0, end - 1), (ops[-1], end, end)]
    return [(ops[0], 0, end - 1 if chain.roles[-1] == "bgemm" else end)]


def _arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    head = f"M{x1} {y1}l-7 -4v8z" if y0 == y1 else f"M{x1} {y1}l-4 -7h8z"
    return f'<path d="M{x0} {y0}L{x1} {y1}"/><path class="head" d="{head}"/>'
