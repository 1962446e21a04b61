# SPDX-License-Identifier: Apache-2.0
"""Tuning sweep of the split-KV merge: times every candidate layout and writes the table that the policy reads.

    python -m benchmarks._tune_merge --json sweep.json --table kernels/tuning/merge_sm90.py
    python -m benchmarks merge                                    (times the finalists again, with more replays)
    python -m benchmarks._tune_merge --from-json sweep.json --finalists benchmarks/results/merge.json --table ...

Every candidate's result is checked against a float64 merge before anything is timed. Merges run back to back on one
buffer: below the L2's size partials come from the cache, as they do behind the attention that wrote them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from fusion_pass.kernels.reduction import KvSplitDecision, default_layout, measured_layouts
from fusion_pass.kernels.triton.merge import batches

from benchmarks import harness
from benchmarks.merge_inputs import HEAD_DIM, candidates, make_problem, serial_whole_row

ROWS = (128, 256, 512, 1024, 2048, 8192)
PARTIALS = (2, 3, 4, 6, 8, 12, 18, 24, 32, 48, 64, 96, 128)
HALF_ROWS = (128, 512, 2048)
HALF_PARTIALS = (4, 8, 18, 32, 64, 128)
MAX_BYTES = 1 << 31
PDL_PARTIALS = (8, 18, 32)
HEADS = 128  # of the merge table
WHOLE_ROW = {"serial, whole row": serial_whole_row(1), "serial, whole row, 4 loads": serial_whole_row(4)}
PDL_ROWS = (128, 256, 512)
# The layouts that the sweep found best at 8, 18 and 32 partials of few rows.
PDL_LAYOUTS = tuple(
    KvSplitDecision(kv_split, "", width, warps, unroll, limit)
    for kv_split, width, warps, unroll, limit in ((1, 128, 1, 8, 18), (2, 512, 4, 4, 16), (4, 512, 4, 2, 8))
)
# An event pair and the start of a graph cost microseconds: spread over so many merges that they do not show.
SAMPLE_US = 700


def points(only_rows=None):
    """(dtype, quantise, rows, partials) to measure, the most wanted first; only_rows: of these rows, fp32 only."""
    if only_rows is not None:
        for rows in only_rows:
            for quantise in (True, False):
                for count in PARTIALS:
                    yield torch.float32, quantise, rows, count
        return
    for dtype, all_rows, all_partials in (
        (torch.float32, ROWS, PARTIALS),
        (torch.bfloat16, HALF_ROWS, HALF_PARTIALS),
    ):
        for rows in all_rows:
            for quantise in (True, False):
                for count in all_partials:
                    if rows < 8192 or count in (3, 6, 18, 64):
                        yield dtype, quantise, rows, count


def key(decision) -> tuple[int, int, int, int, int, int]:
    """Everything of a decision that selects a compiled kernel."""
    layout = (decision.kv_split, decision.width, decision.num_warps, decision.unroll, decision.unroll_limit)
    return *layout, decision.batch


def _compile(share) -> int:
    """Worker: compile this share of (dtype, quantise, partials, candidate) into Triton's disk cache."""
    pool = torch.randn(1 << 24, device="cuda")
    for dtype, quantise, count, decision in share:
        make_problem(count, 128, dtype, pool).call(decision, quantise)
    torch.cuda.synchronize()
    return len(share)


def precompile(processes: int, only_rows=None) -> None:
    """Compile all candidates in parallel processes: one after the other they take many minutes."""
    jobs = {}
    for dtype, quantise, rows, count in points(only_rows):
        for decision in [*candidates(count, rows, dtype.itemsize), serial_whole_row(1), serial_whole_row(4)]:
            # The count enters the compiled kernel through the size and the number of its batches of loads only.
            kind = (dtype, quantise, batches(count, decision), key(decision)[:3])
            jobs.setdefault(kind, (dtype, quantise, count, decision))
    for quantise in (False, True):
        for layout in PDL_LAYOUTS:
            for count in PDL_PARTIALS:
                jobs[quantise, count, layout] = (torch.float32, quantise, count, replace(layout, pdl=True))
    work = sorted(jobs.values(), key=lambda job: -job[2] * job[3].kv_split)
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        shares = 4 * processes  # small ones: kernels differ in how long they compile
        pool.map(_compile, [work[i::shares] for i in range(shares)], chunksize=1)
    print(f"compiled {len(work)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def _graph(calls: int, call) -> torch.cuda.CUDAGraph:
    """Capture without the garbage collection that torch.cuda.graph runs each time: there are thousands of these."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for _ in range(calls):
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def time_point(problem, decisions, quantise: bool, rounds: int) -> list[float]:
    """Median microseconds of each decision, measured in turn."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    probe = decisions[0]
    problem.call(probe, quantise)
    torch.cuda.synchronize()
    start.record()
    problem.call(probe, quantise)
    end.record()
    end.synchronize()
    calls = int(max(3, min(200, SAMPLE_US / max(start.elapsed_time(end) * 1e3, 4))))
    graphs = []
    for decision in decisions:
        problem.call(decision, quantise)
        graphs.append(_graph(calls, lambda decision=decision: problem.call(decision, quantise)))
    samples = [[] for _ in graphs]
    for round_ in range(rounds + 1):
        for graph, values in zip(graphs, samples):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_:
                values.append(start.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(values) for values in samples]


def check(problem, decisions, quantise: bool) -> None:
    """Every candidate against float64; raises AssertionError naming the candidate."""
    expected = problem.expected().float()
    for decision in decisions:
        problem.out.fill_(float("nan"))
        problem.codes.fill_(0x7F)
        problem.call(decision, quantise)
        if quantise:
            groups, tokens, width = problem.codes.shape
            value = problem.codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 128))
            value = value * problem.scales[..., :tokens].transpose(1, 2)[..., None]
            got = value.reshape(groups, tokens, -1, HEAD_DIM).transpose(0, 1).reshape(expected.shape)
            plain = slice(0, HEAD_DIM - 64)  # the rotated channels are checked by the tests
            got, want, limit = got[..., plain], expected[..., plain], 0.04
        else:
            got, want, limit = problem.out.float(), expected, 4e-3
        error = harness.norm_error(got, want)
        assert error < limit, f"{key(decision)}: relative error {error}"


def sweep(rounds: int, deadline: float, only_rows=None) -> list[dict]:
    """Time every point; stops with a message when the deadline (perf_counter seconds) has passed."""
    pool = torch.randn(MAX_BYTES // 4, device="cuda")
    rows_out = []
    for dtype, quantise, rows, count in points(only_rows):
        if time.perf_counter() > deadline:
            print(f"stopped before {dtype}, epilogue {quantise}, {rows} rows, {count} partials", flush=True)
            break
        problem = make_problem(count, rows, dtype, pool)
        decisions = candidates(count, rows, dtype.itemsize)
        if rows == 256:
            check(problem, decisions, quantise)
        for decision, us in zip(decisions, time_point(problem, decisions, quantise, rounds)):
            kv_split, width, warps, unroll, limit, batch = key(decision)
            rows_out.append(
                {
                    "element_size": dtype.itemsize,
                    "epilogue": quantise,
                    "rows": rows,
                    "partials": count,
                    "kv_split": kv_split,
                    "width": width,
                    "warps": warps,
                    "unroll": unroll,
                    "unroll_limit": limit,
                    "batch": batch,
                    "us": round(us, 3),
                }
            )
    return rows_out


def pdl_gain() -> list[dict]:
    """Merge behind a merge, the best layout with and the best without programmatic dependent launch."""
    pool = torch.randn(1 << 26, device="cuda")
    out = []
    for quantise in (False, True):
        for rows in PDL_ROWS:
            for count in PDL_PARTIALS:
                problem = make_problem(count, rows, torch.float32, pool)
                both = [replace(layout, pdl=pdl) for pdl in (False, True) for layout in PDL_LAYOUTS]
                times = time_point(problem, both, quantise, 9)
                plain, dependent = min(times[: len(PDL_LAYOUTS)]), min(times[len(PDL_LAYOUTS) :])
                out.append({"epilogue": quantise, "rows": rows, "partials": count, "us": plain, "us_pdl": dependent})
    return out


def warm_clocks(seconds: float = 0.5) -> None:
    """Keep the GPU busy until its clocks have risen."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


HEADER = '''# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Measured layouts of the split-KV merge on {device}; written by ``python -m benchmarks._tune_merge``, not by hand.

One line per measured point: by (element size of the partials, epilogue), rows, partials: for every KvSplit the fastest
layout as (microseconds, channels per CTA, warps, unroll, whole-unroll limit[, batch of the unrolled form]).
"""

DEVICE = "{device}"
HEAD_DIM = 512
# Largest number of rows at which programmatic dependent launch was faster at every measured count of partials.
PDL_MAX_ROWS = {pdl}

Entry = tuple[float, ...]
MEASURED: dict[tuple[int, bool], dict[int, dict[int, dict[int, Entry]]]] = {{
'''

FOOTER = '''}


def measured(element_size: int, epilogue: bool) -> dict[int, dict[int, dict[int, Entry]]]:
    """{rows: {partials: {KvSplit: (us, width, warps, unroll, unroll_limit[, batch])}}} for one kind of merge; {} = not
    measured."""
    return MEASURED.get((element_size, epilogue), {})
'''


def fastest(rows: list[dict]) -> dict:
    """{(element size, epilogue): {rows: {partials: {KvSplit: fastest entry}}}} of a sweep."""
    best: dict = {}
    for row in rows:
        point = best.setdefault((row["element_size"], row["epilogue"]), {}).setdefault(row["rows"], {})
        by_split = point.setdefault(row["partials"], {})
        entry = (row["us"], row["width"], row["warps"], row["unroll"], row["unroll_limit"])
        entry = (*entry, row["batch"]) if row.get("batch") else entry
        by_split[row["kv_split"]] = min(by_split.get(row["kv_split"], entry), entry)
    return best


def take_finalists(best: dict, table_rows: list[dict]) -> None:
    """Replace the sweep's times by those of the merge table (`best` is changed in place).

    The table times the layouts that won the sweep again, longer and in turn; points that the sweep lacks are added, and
    the whole-row serial forms compete as KvSplit 1.
    """
    retimed: dict = {}
    for row in table_rows:
        name, kind, rows, count = row["variant"], (4, row["epilogue"]), row["T"] * HEADS, row["partials"]
        if name.startswith("KvSplit "):
            kv_split = int(name.removeprefix("KvSplit "))
        elif name.startswith("serial"):
            kv_split = 1
        else:
            continue
        layout = WHOLE_ROW.get(name) or measured_layouts(best[kind], count, rows).get(kv_split)
        # What the table falls back to for a KvSplit that the nearest measured point does not have.
        layout = layout or default_layout(kv_split, head_dim=HEAD_DIM, element_size=4, reason="not measured")
        entry = (row["us"], *key(layout)[1:-1], *filter(None, [layout.batch]))
        point = retimed.setdefault((kind, rows, count), {})
        point[kv_split] = min(point.get(kv_split, entry), entry)
    for (kind, rows, count), point in retimed.items():
        best[kind][rows].setdefault(count, {}).update(point)


def write_table(body: dict, path: Path, finalists: list[dict]) -> None:
    """Reduce a sweep to the fastest layout per point and KvSplit, and write it as a Python module."""
    best = fastest(body["rows"])
    take_finalists(best, finalists)
    pdl_max = 0
    for rows in sorted({row["rows"] for row in body["pdl"]}):
        if all(row["us_pdl"] < row["us"] for row in body["pdl"] if row["rows"] == rows):
            pdl_max = rows
        else:
            break
    lines = [HEADER.format(device=body["environment"]["gpu"], pdl=pdl_max)]
    for kind, by_rows in sorted(best.items()):
        lines.append(f"    {kind}: {{\n")
        for rows, by_partials in sorted(by_rows.items()):
            lines.append(f"        {rows}: {{\n")
            for count, by_split in sorted(by_partials.items()):
                lines.append(f"            {count}: {dict(sorted(by_split.items()))},\n")
            lines.append("        },\n")
        lines.append("    },\n")
    path.write_text("".join(lines) + FOOTER)


def _not_measured(now: list[dict], earlier: list[dict]) -> list[dict]:
    """The rows of an earlier sweep whose points the new one lacks."""

    def point(row: dict) -> tuple:
        return row["element_size"], row["epilogue"], row["rows"], row["partials"]

    measured = {point(row) for row in now}
    return [row for row in earlier if point(row) not in measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the sweep")
    parser.add_argument("--from-json", type=Path, help="an earlier sweep, instead of measuring")
    parser.add_argument("--table", type=Path, help="module to write")
    parser.add_argument("--finalists", type=Path, help="results of the merge table, whose times replace the sweep's")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache only, no timing")
    parser.add_argument("--rows", type=int, nargs="+", help="measure these rows only (fp32 partials)")
    parser.add_argument("--update", type=Path, help="an earlier sweep, which keeps the points that are not measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of the measurement itself")
    parser.add_argument("--processes", type=int, default=16, help="processes that compile first; 0: compile on use")
    args = parser.parse_args()
    if args.compile_only:
        precompile(args.processes, args.rows)
        return
    if args.from_json:
        body = json.loads(args.from_json.read_text())
    else:
        if args.processes:
            precompile(args.processes, args.rows)
        warm_clocks()
        start = time.perf_counter()
        body = {"environment": harness.environment(), "pdl": pdl_gain()}
        body["rows"] = sweep(args.rounds, start + args.seconds, args.rows)
        print(f"measured {len(body['rows'])} variants in {time.perf_counter() - start:.0f} s", flush=True)
        if args.update:
            body["rows"] += _not_measured(body["rows"], json.loads(args.update.read_text())["rows"])
        if args.json:
            args.json.write_text(json.dumps(body))
    if args.table:
        finalists = json.loads(args.finalists.read_text())["rows"] if args.finalists else []
        write_table(body, args.table, finalists)


if __name__ == "__main__":
    main()
