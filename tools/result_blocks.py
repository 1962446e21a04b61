"""Sentences and tables of README.md and docs/ that say what committed results mean; ``docs_blocks.py`` calls them.

Each function takes ``read``: the content of benchmarks/results/NAME.json by NAME, or None where there is no such file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

Read = Callable[[str], "dict[str, Any] | None"]
Rows = dict[tuple[Any, ...], dict[str, Any]]

ONE_KERNEL = "torch.bmm"
NO_FIGURES = "No figures are committed."


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows])


def wrapped(text: str) -> str:
    """A paragraph in lines, as the pages' other paragraphs are."""
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False)


def rows_of(read: Read, name: str) -> list[dict[str, Any]]:
    """Rows of a result that have a figure; none where the file is missing."""
    return [row for row in (read(name) or {"rows": []})["rows"] if "failed" not in row]


def by_place(read: Read, name: str) -> Rows:
    return {(row["shape"], row["T"], row["variant"]): row for row in rows_of(read, name)}


def made(read: Read, *names: str) -> str:
    """Which runs these tables are of: day, and a hash of the kernels' sources where the result has one."""
    runs: dict[str, list[str]] = {}
    for name in names:
        env = (read(name) or {"environment": {}})["environment"]
        day = env.get("time", "an unknown day").partition("T")[0]
        runs.setdefault(f"{day}, kernels {env.get('kernels', 'not recorded')}", []).append(f"`{name}.json`")
    return "; ".join(f"{', '.join(files)}: {run}" for run, files in runs.items())


def peers(read: Read) -> str:
    """What the peers' chains of chain.json used for rotation and quantisation."""
    result = read("chain")
    if result is None:
        return "No chains are committed."
    used = {row["quantisation"] for row in result["rows"] if "quantisation" in row}
    if used == {"vLLM"}:
        version = result["environment"].get("vllm")
        return f"The peers' chains used vLLM's quantisation kernel ({version})."
    slower = [row["T"] for row in rows_of(read, "rope_quant") if row["variant"] == "vLLM" and row["ratio"] < 1]
    said = "The peers' chains used a stand-in for vLLM's quantisation kernel"
    if slower:
        said += f", which was faster than that kernel at {_list(map(str, slower))} tokens (`rope_quant.json`)"
    return said + "."


def sources(read: Read) -> str:
    """Of which runs the tables are, and what the peers' chains used."""
    kernels = ("attention", "bgemm", "chain", "rope_quant", "merge_in_attention", "merge")
    names = (*kernels, "host", "decode_graphs", "model")
    return wrapped(f"{made(read, *(name for name in names if read(name)))}. {peers(read)}")


def how_fast(read: Read) -> str:
    """The chain against the peers, decode steps and prompts against plain Inductor, and host times, in a few lines."""
    parts = []
    chains = by_place(read, "chain")
    over: dict[str, list[float]] = {"bf16": [], "FP8": []}
    for (*place, name), row in chains.items():
        for kv in over:
            theirs = chains.get((*place, f"peers, {kv} KV"))
            if name == f"fusion_pass, {kv} KV" and theirs is not None:
                over[kv].append(theirs["us"] / row["us"])
    if all(over.values()):
        parts.append(
            "Over the same kind of cache the peers' chain takes "
            + " and ".join(
                f"{min(found):.2f} to {max(found):.2f} times as long ({kv} keys)" for kv, found in over.items()
            )
            + "."
        )
    slower = {
        name: [
            chains[(*place, name)]["us"] / row["us"]
            for (*place, kernel), row in chains.items()
            if kernel == "fusion_pass, bf16 KV" and (*place, name) in chains
        ]
        for name in ("torch, unfused", "torch, Inductor")
    }
    if all(slower.values()):
        unfused, compiled = (f"{min(found):.1f} to {max(found):.1f}" for found in slower.values())
        parts.append(
            f"In torch's own operations it takes {unfused} times as long, compiled by plain Inductor {compiled}."
        )
    prompts, models = [], by_place(read, "model")
    for (shape, tokens, name), row in models.items():
        plain = models.get((shape, tokens, "inductor"))
        if name == "fusion_pass" and row["phase"] == "prefill" and row["form"] == "bf16" and plain:
            prompts.append(
                f"a prompt of {tokens:,} tokens {row['ms'] / plain['ms']:.2f} of its time and "
                f"{row['peak_gib'] / plain['peak_gib']:.2f} of its memory"
            )
    steps = [
        f"{row['relative_to_inductor']:.2f} at batch {row['batch']}"
        for row in _captured(read)
        if row["variant"] == "fusion_pass"
    ]
    if prompts and steps:
        parts.append(
            f"Against plain Inductor, transformers' model (four layers) takes for {_list(prompts)}, and for a "
            f"decode step in a CUDA graph {_list(steps)} of its time: most of a step is experts and "
            "projections that the pass does not touch."
        )
    if "stand-in" in peers(read):
        parts.insert(1, peers(read))
    host = _host(read)
    if host:
        parts.append(
            f"Without CUDA graphs the host is the limit: a fused op costs {_range(host['replay'])} us of host "
            "time where its form was seen before ([launch plans](docs/how-it-works.md#launch-plans)), "
            f"{_range(host['ordinary'])} where it is launched the ordinary way"
            + (f", {_range(host['first'])} at the first call of a form" if host["first"] else "")
            + f", and one `torch.bmm` {_range(host['one'])}. Decode under CUDA graphs."
        )
    return wrapped(" ".join(parts))


def _captured(read: Read) -> list[dict[str, Any]]:
    return [row for row in rows_of(read, "decode_graphs") if row["way"] == "captured" and "ms" in row]


def _host(read: Read) -> dict[str, list[float]] | None:
    """Host microseconds of 64 heads' calls: by launch plan, without, when the plan is made, and of one kernel."""
    rows = [row for row in rows_of(read, "host") if row["shape"].startswith("flash")]
    found: dict[str, list[float]] = {"replay": [], "ordinary": [], "one": [], "first": []}
    for row in rows:
        kind = "one" if ONE_KERNEL in row["shape"] else row["variant"].partition(" ")[0]
        if kind in found:
            found[kind].append(row["us"])
    return found if all(found[kind] for kind in ("replay", "ordinary", "one")) else None


def measured_attention(read: Read) -> str:
    """Attention with the whole epilogue against FlashMLA, which leaves rotation and quantisation to others."""
    ours, theirs = "fusion_pass, inverse RoPE + FP8", "FlashMLA, bf16 KV"
    found = _at_tokens(read, "attention", ours, theirs, low=64)
    parts = (f"{other / own:.2f} at {tokens:,}" for tokens, own, other in found)
    return (
        wrapped(
            "In `attention.json` FlashMLA's kernel over bf16 rows takes, of the time of ours with the whole "
            f"epilogue: {_list(parts)} tokens of 128 heads."
        )
        if found
        else NO_FIGURES
    )


def measured_pages(read: Read) -> str:
    """What FP8 pages cost the attention."""
    pages = "fusion_pass, FP8 KV, inverse RoPE + FP8"
    found = _at_tokens(read, "attention", pages, "fusion_pass, inverse RoPE + FP8", low=1)
    parts = (f"{own - other:.1f} us at {tokens:,}" for tokens, own, other in found)
    return (
        wrapped(
            "In `attention.json` the kernel over pages takes longer than the one over bf16 rows by "
            f"{_list(parts)} tokens of 128 heads."
        )
        if found
        else NO_FIGURES
    )


def measured_product(read: Read) -> str:
    """The product alone against DeepGEMM's."""
    found = _at_tokens(read, "bgemm", "fusion_pass", "DeepGEMM", low=64)
    parts = (f"{own:.1f} us at {tokens:,} ({other:.1f})" for tokens, own, other in found)
    return (
        wrapped(f"In `bgemm.json` the product takes {_list(parts)} tokens of 128 heads; in brackets DeepGEMM.")
        if found
        else NO_FIGURES
    )


def measured_rotation(read: Read) -> str:
    """Standalone rotation and quantisation against the stand-in and vLLM's kernel."""
    rows = [
        row
        for row in rows_of(read, "rope_quant")
        if row["variant"] == "default" and row["shape"] == "pro" and "vLLM / this" in row
    ]
    parts = (f"{row['us']:.1f} us at {row['T']:,} ({row['ratio']:.2f}, {row['vLLM / this']:.2f})" for row in rows)
    return (
        wrapped(
            f"In `rope_quant.json` it takes {_list(parts)} tokens of 128 heads; in brackets how many times as "
            "long the stand-in and vLLM's own kernel take in the same run."
        )
        if rows
        else NO_FIGURES
    )


def _at_tokens(read: Read, name: str, ours: str, theirs: str, low: int) -> list[tuple[int, float, float]]:
    """(tokens, our time, their time) of the 128-head rows from ``low`` tokens on that have both."""
    rows = by_place(read, name)
    return [
        (tokens, row["us"], rows["pro", tokens, theirs]["us"])
        for (shape, tokens, variant), row in rows.items()
        if shape == "pro" and variant == ours and tokens >= low and ("pro", tokens, theirs) in rows
    ]


def decode_step(read: Read) -> str:
    """The kernels of a decode step by category, and what that leaves to the chain."""
    captured = {(row["batch"], row["variant"]): row for row in _captured(read)}
    batches = sorted({batch for batch, variant in captured if (batch, "inductor") in captured})
    if not batches:
        return "No decode steps are committed: `python -m benchmarks decode_graphs --profile` times them."
    reached = [
        f"{captured[batch, 'fusion_pass']['relative_to_inductor']:.2f} of plain Inductor's time at batch {batch}"
        for batch in batches
        if (batch, "fusion_pass") in captured
    ]
    text = [f"The whole step of transformers' 4-layer slice takes {_list(reached)}."]
    listed: dict[tuple[int, str], tuple[int, float, dict[str, float]]] = {
        place: (row["kernels"], row["kernel_us"], row["profile"]) for place, row in captured.items() if "profile" in row
    }
    for batch in sorted({batch for batch, _ in listed}):
        plain, ours = listed.get((batch, "inductor")), listed.get((batch, "fusion_pass"))
        if plain and ours:
            rest = ours[1] - ours[2]["attention and merge"]
            text.append(
                f"At batch {batch} the kernels beside attention and merge are {rest / ours[1]:.0%} of the sum "
                "of kernel times in the step with the pass; with no time at all for those two, that sum is "
                f"{rest / plain[1]:.2f} of plain Inductor's."
            )
    if not listed:
        return wrapped(" ".join(text))
    head = ["batch", "variant", "kernels", "microseconds", *next(iter(listed.values()))[2]]
    rows = (
        [str(batch), variant, str(count), f"{total:.1f}", *(f"{us:.1f}" for us in times.values())]
        for (batch, variant), (count, total, times) in sorted(
            listed.items(), key=lambda item: (item[0][0], item[0][1] == "fusion_pass")
        )
    )
    return (
        wrapped(" ".join(text)) + "\n\nKernels of one replayed CUDA graph (sums of their times, which count what "
        "overlaps twice):\n\n" + table(head, rows)
    )


def targets(read: Read) -> str:
    """The targets of the Hopper kernels beside what the committed results reached."""
    names = ("chain", "attention", "bgemm", "rope_quant")
    rows = {name: by_place(read, name) for name in names}

    Figure = Callable[[tuple[str, int]], tuple[float, float, str]]

    def chain(kv: str, target: float) -> Figure:
        def reached(at: tuple[str, int]) -> tuple[float, float, str]:
            """Against the fastest chain of the peers, whatever they hold their keys in; for FP8 pages, theirs."""
            times = {name: row for (*place, name), row in rows["chain"].items() if tuple(place) == at}
            ours = min(
                (name for name in times if name.startswith(f"fusion_pass, {kv} KV")), key=lambda name: times[name]["us"]
            )
            product = ours.removeprefix(f"fusion_pass, {kv} KV")
            if kv == "FP8":
                return times[ours]["FP8 peer / this"], target, product
            best = min((name for name in times if name.startswith("peers")), key=lambda name: times[name]["us"])
            return times[ours]["best peer / this"], target, f"{product} ({best})"

        return reached

    def of(column: str, target: float) -> Figure:
        return lambda at: (rows["bgemm"][(*at, "fusion_pass")][column], target, "")

    def epilogue(target: float) -> Figure:
        # negated: a cost must stay below its target
        name = "fusion_pass, inverse RoPE + FP8"
        return lambda at: (-rows["attention"][(*at, name)]["epilogue cost"], -target, "")

    def standalone(target: float) -> Figure:
        def reached(at: tuple[str, int]) -> tuple[float, float, str]:
            row = rows["rope_quant"][(*at, "default")]
            return (row["vLLM / this"], target, "") if "vLLM / this" in row else (row["ratio"], target, " (stand-in)")

        return reached

    wanted = [
        ("chain, bf16 rows, against the peers' best chain", chain("bf16", 1.3), "pro", (1, 2, 4, 8, 16, 32)),
        ("the same", chain("bf16", 1.2), "pro", (64, 128, 256, 1024, 2048)),
        ("the same", chain("bf16", 1.15), "pro", (4096,)),
        (
            "chain, FP8 pages, against the peers' FP8 chain",
            chain("FP8", 1.2),
            "pro",
            (1, 2, 4, 8, 16, 32, 64, 128, 256),
        ),
        ("chain, bf16 rows, against the peers' best chain", chain("bf16", 1.25), "flash", (1, 8, 64, 256)),
        ("product alone, fraction of a read of the weight", of("weight read / this", 0.92), "pro", (1, 2, 4, 8, 16)),
        ("the same", of("weight read / this", 0.86), "flash", (1, 2, 4, 8, 16)),
        ("product alone, against DeepGEMM", of("DeepGEMM / this", 0.95), "pro", (256, 4096)),
        ("cost of the epilogue inside attention", epilogue(0.02), "pro", (64, 128, 256)),
        ("the same", epilogue(0.04), "pro", (1024, 2048, 4096)),
        ("rotation and quantisation alone, against vLLM's kernel", standalone(1.0), "pro", (1,)),
        ("the same", standalone(2.0), "pro", (64, 128, 256, 1024)),
    ]
    body = []
    for what, figure, shape, counts in wanted:
        for tokens in counts:
            reached, target, note = figure((shape, tokens))
            figures = (
                (f"{target:.2f}", f"{reached:.3f}") if target > 0 else (f"at most {-target:.0%}", f"{-reached:.1%}")
            )
            body.append([what + note, shape, str(tokens), *figures, "" if reached >= target else "missed"])
    body += _model_targets(read)
    missed = sum(row[-1] == "missed" for row in body)
    text = f"{made(read, *names, 'model', 'decode_graphs')}. {peers(read)} {missed} of {len(body)} rows are missed."
    return f"{wrapped(text)}\n\n" + table(["row", "shape", "tokens", "target", "reached", ""], body)


def _model_targets(read: Read) -> list[list[str]]:
    """Rows of transformers' slice, where the ratio to plain Inductor must stay below its target."""
    found: list[tuple[str, int, float, float]] = []
    models = by_place(read, "model")
    place = ("bf16 prefill", 8192)
    plain, ours = models.get((*place, "inductor")), models.get((*place, "fusion_pass"))
    if plain and ours:
        found += [
            (f"transformers' slice, {what} of a prompt, of plain Inductor's", place[1], 0.5, ours[key] / plain[key])
            for what, key in (("time", "ms"), ("peak memory", "peak_gib"))
        ]
    found += [
        ("transformers' slice, a decode step, of plain Inductor's", row["batch"], 0.8, row["relative_to_inductor"])
        for row in _captured(read)
        if row["variant"] == "fusion_pass"
    ]
    return [
        [what, "flash", str(tokens), f"at most {target:.2f}", f"{reached:.3f}", "missed" if reached > target else ""]
        for what, tokens, target, reached in found
    ]


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f} to {high:.0f}" if round(low) != round(high) else f"{low:.0f}"


def _list(parts: Iterable[str]) -> str:
    parts = list(parts)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
