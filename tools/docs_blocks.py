"""Fill the generated blocks of README.md and docs/*.md.

    python tools/docs_blocks.py            write them
    python tools/docs_blocks.py --check    exit code 1 when a committed block is not what this code gives

A block stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; what NAME means is in :data:`BLOCKS`. Figures
come from benchmarks/results/*.json and nowhere else.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MADE_WITH = "2.13"  # torch whose traced graphs stand in the pages
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import result_blocks  # noqa: E402
from result_blocks import table  # noqa: E402

import fusion_pass  # noqa: E402
from fusion_pass.details import line  # noqa: E402


def _example() -> Any:
    path = ROOT / "examples" / "plain_attention.py"
    spec = importlib.util.spec_from_file_location("plain_attention", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def graph() -> str:
    """The graph of examples/plain_attention.py before and after ``rewrite``: inputs and computing operators."""
    model, args = _example().example()
    with torch.no_grad():
        program = torch.export.export(model, args).run_decompositions({})
        before = _listing(program.graph)
        fusion_pass.rewrite(program, fusion_pass.Config(disable=False))
        after = _listing(program.graph)
    return (f"Before ({len(before)} computing operators; views are left out):\n\n```text\n" + "\n".join(before)
            + f"\n```\n\nAfter ({len(after)}):\n\n```text\n" + "\n".join(after) + "\n```")


def _listing(graph: torch.fx.Graph) -> list[str]:
    """Computing nodes with short names, references resolved through views."""
    names: dict[torch.fx.Node, str] = {}
    lines, count = [], 0
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name.removeprefix("p_")
        elif node.op == "call_function":
            if not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
                continue
            if node.target is operator.getitem:
                names[node] = f"{names[node.args[0]]}[{node.args[1]}]"
                continue
            if node.target.is_view or node.target._opname in (
                    "_unsafe_view", "reshape"):
                names[node] = names[node.all_input_nodes[0]]
                continue
            names[node] = f"%{count}"
            count += 1
            lines.append(_renamed(line(node), node, names))
    return lines


def _renamed(text: str, node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    head, equals, call = text.partition(" = ")
    function, _, arguments = call.partition("(")
    for source in sorted(node.all_input_nodes, key=lambda n: -len(n.name)):
        arguments = re.sub(rf"\b{source.name}\b", lambda _, n=source: f"\0{names[n]}\0", arguments)
    head = head.replace(f"{node.name}:", f"{names[node]}:", 1)
    return f"{head}{equals}{function}({arguments}".replace("\0", "").replace(", device=cpu, pin_memory=False", "")


def report() -> str:
    """The report of the same example."""
    model, args = _example().example()
    with torch.no_grad():
        text = str(fusion_pass.explain(model)(*args))
    text = re.sub(r" \(\d+ nodes.*?\)", "", text).replace(f"{ROOT}/", "")
    return f"```text\n{text}\n```"


def benchmarks(*names: str) -> str:
    """Tables of committed results: times in microseconds (rows: tokens, columns: variants), or the rows as they are."""
    files = [RESULTS / f"{n}.json" for n in names] if names else sorted(RESULTS.glob("*.json"))
    read = [(path, json.loads(path.read_text())) for path in files if path.is_file()]
    # Sweeps that only feed the launch tables are no benchmarks.
    parts = [_result({"benchmark": path.stem, **values}) for path, values in read if "sweep" not in path.stem]
    if not parts:
        return "No results are committed: `python -m benchmarks all` on a GPU writes them to `benchmarks/results/`."
    return "\n\n".join(parts)


def tensor_parallel() -> str:
    """The two-GPU run: time of a call and of a replay of its CUDA graph, plain Inductor beside the pass."""
    made = json.loads((RESULTS / "tensor_parallel.json").read_text())
    env, logits = made["environment"], made["logits"]
    columns = [(1, "inductor"), (1, "fusion_pass"), (2, "inductor"), (2, "fusion_pass")]
    cells = {((row["phase"], row["T"], row["batch"]), (row["ranks"], row["variant"])):
             f"{row['ms']:.1f} / {row['graph_ms']:.2f}" for row in made["rows"]}
    keys = list(dict.fromkeys(key for key, _ in cells))
    head = ["what", "tokens", "batch", *(f"{ranks} GPU{'s' * (ranks > 1)}, {variant}" for ranks, variant in columns)]
    body = table(head, ([*map(str, key), *(cells[key, column] for column in columns)] for key in keys))
    fused = ", ".join(map(str, made["layers_fused_by_rank"]))
    return (f"**tensor_parallel** on {env['gpus']} x {env['gpu']}, torch {env['torch']}, triton {env['triton']}; "
            f"milliseconds of a call / of a replay of its CUDA graph, the collective inside:\n\n{body}\n\n"
            f"Layers fused: {fused} of {made['layers']} on the two ranks. Relative distance of the logits "
            f"({logits['tokens']} tokens, bf16): two GPUs to one {logits['split_to_one_rank']:.2e}; to float64 "
            f"{logits['split_to_float64']:.2e} (one GPU: {logits['one_rank_to_float64']:.2e}).")


def variants() -> str:
    """Tables of the variants that were measured on the way to the Hopper kernels."""
    kept = json.loads((RESULTS / "hopper_variants_sweep.json").read_text())
    parts = kept["parts"].items()
    return "\n\n".join(_result({"benchmark": n, "environment": kept["environment"], "rows": rows}) for n, rows in parts)


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def targets() -> str:
    """The targets of the Hopper kernels beside what the committed results reached."""
    return result_blocks.targets(_read)


def _result(values: dict[str, Any]) -> str:
    env, failed = values["environment"], [row for row in values["rows"] if "failed" in row]
    rows = [row for row in values["rows"] if "failed" not in row]
    if failed:
        return _result({**values, "rows": rows}) + f"\n\n{len(failed)} more cases failed, as the JSON says."
    if values["benchmark"] == "tensor_parallel":
        return tensor_parallel()
    title = (f"**{values['benchmark']}** on {env.get('gpu', 'an unnamed device')}, torch {env.get('torch', '?')}, "
             f"triton {env.get('triton', '?')}")
    if all({"shape", "T", "variant", "ms", "peak_gib"} <= row.keys() for row in rows):
        return _model_result(title, rows)
    pivot = all({"shape", "T", "variant", "us"} <= row.keys() for row in rows)
    if not pivot:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        return f"{title}\n\n{table(columns, ([_cell(row.get(c, '')) for c in columns] for row in rows))}"
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    cells = {(row["shape"], row["T"], row["variant"]): row["us"] for row in rows}
    if len(cells) < len(rows):
        raise ValueError(f"{values['benchmark']}: rows share shape, T and variant: one figure would hide another")
    keys = list(dict.fromkeys((row["shape"], row["T"]) for row in rows))
    body = ([s, str(t), *(_cell(cells.get((s, t, v), "")) for v in variants)] for s, t in keys)
    return f"{title}, microseconds\n\n{table(['shape', 'tokens', *variants], body)}"


def _model_result(title: str, rows: list[dict[str, Any]]) -> str:
    """Time and peak memory of whole models; notes of single figures go below the table."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    notes = list(dict.fromkeys(row["note"] for row in rows if row.get("note")))
    cells: dict[tuple[str, int, str, str], str] = {}
    for row in rows:
        key = (row["shape"], row["T"], row.get("note", ""), row["variant"])
        cells[key] = f"{row['ms']:.1f} ms, {row['peak_gib']:.2f} GiB"
    keys = list(dict.fromkeys((row["shape"], row["T"], row.get("note", "")) for row in rows))
    body = ([s + (f" ({notes.index(n) + 1})" if n else ""), str(t), *(cells.get((s, t, n, v), "") for v in variants)]
            for s, t, n in keys)
    text = f"{title}\n\n{table(['what', 'tokens', *variants], body)}"
    return text + "".join(f"\n\n({i}) {note}" for i, note in enumerate(notes, 1))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"
    return "" if value is None else str(value)


def config() -> str:
    """Fields of ``Config``: default and description, from the class itself."""
    text = fusion_pass.Config.__doc__ or ""
    found = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\n\n    Raises)", text, re.S | re.M))
    rows = []
    for field in dataclasses.fields(fusion_pass.Config):
        description = " ".join(found[field.name].replace("``", "`").split())
        used = [f"`{path.relative_to(ROOT).as_posix()}`" for folder in ("fusion_pass", "kernels")
                for path in sorted((ROOT / folder).rglob("*.py"))
                if path.name != "config.py" and re.search(rf"\bconfig\.{field.name}\b", path.read_text())]
        if not used:
            raise SystemExit(f"Config.{field.name} is read nowhere: an option without effect")
        rows.append([f"`{field.name}`", f"`{field.default!r}`", description, ", ".join(used)])
    return table(["field", "default", "meaning", "read in"], rows)


def declared() -> str:
    """Declared ops of libraries and engines, with the tests that run each."""
    from fusion_pass.patterns import opaque

    files = sorted([*ROOT.glob("tests/patterns/*.py"), *ROOT.glob("tests/models/*.py")])
    tests = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    rows = []
    for row in opaque.ROWS:
        namespace, _, name = row.name.partition("::")
        by = [f"`{path}`" for path, text in tests.items() if "/test_" in path and re.search(rf"\b{name}\b", text)
              and (namespace == "*" or namespace in text)]
        how = "written out and fused" if row.expand else "stays opaque; what follows is fused"
        rows.append([f"`{row.name}`", row.versions, ", ".join(row.roles), how, ", ".join(by) or "not yet tested"])
    return table(["op", "versions", "roles", "what happens", "tested by"], rows)


def corpus() -> str:
    """Cases of the corpus by the roles that they expect."""
    counts: dict[tuple[str, str], int] = {}
    negative = 0
    for path in sorted(ROOT.glob("tests/corpus/cases/*.py")):
        text = path.read_text()
        found = re.search(r"EXPECT = dict\(fused=True,\s*roles=\[(.*?)\],\s*quant=(.*?),", text, re.S)
        if found is None:
            negative += 1
            continue
        key = (found[1].replace("'", "").replace("\n", " "), found[2].strip("'\" "))
        counts[key] = counts.get(key, 0) + 1
    rows = [[roles, quant, str(count)] for (roles, quant), count in sorted(counts.items())]
    rows.append(["nothing may be fused", "", str(negative)])
    return table(["roles that are fused", "scale rule", "cases"], rows)


def roles() -> str:
    """The roles, their arguments and their reference functions."""
    from fusion_pass.patterns.roles import ROLES

    return table(["role", "arguments", "options", "reference"],
                  ([f"`{r.name}`", f"`{r.schema}`", ", ".join(f"`{o}`" for o in r.options),
                    f"`patterns/{r.reference.__module__.rpartition('.')[2]}.py`"] for r in ROLES.values()))


def compiled() -> str:
    """Architectures that the compile tests cover, and the shared memory they check against."""
    text = (ROOT / "tests" / "kernels" / "compile_tool.py").read_text()
    found = re.search(r"^SHARED_MEMORY = \{(.*?)\}", text, re.M)
    assert found is not None
    rows = ([f"sm_{sm}", str(int(size) // 1024)] for sm, size in re.findall(r"(\d+): (\d+)", found[1]))
    return table(["architecture", "shared memory per program, KiB"], rows)


def errors() -> str:
    """Errors that tests printed (docs/errors.json, by tools/error_table.py)."""
    path = ROOT / "docs" / "errors.json"
    if not path.is_file():
        return "No figures are committed: `python tools/error_table.py` writes them."
    made = json.loads(path.read_text())
    kinds = ("sliding window", "CSA", "HCA")
    rows = ([kinds[row["layer"] % 3], f"{row['eager']:.2e}", f"{row['compiled']:.2e}"] for row in made["rows"])
    return (f"`{made['test']}` on {made['device']}, torch {made['torch']}:\n\n"
            + table(["attention layer", "eager bf16", "compiled bf16"], rows))


def _kept(name: str, made_by: str) -> Any:
    """Figures of docs/NAME.json, or a line that says how to make them."""
    path = ROOT / "docs" / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else f"No figures are committed: `{made_by}` writes them."


def _names(failed: list[str]) -> str:
    """Failed tests, the cases of one parametrised test as one."""
    counted = Counter(name.partition("[")[0] for name in failed)
    return "".join(f" {name}" + (f" ({count} cases)" if count > 1 else "") for name, count in counted.items())


def versions() -> str:
    """Versions that the test-suite ran with (docs/versions.json, by tools/version_matrix.py)."""
    made = _kept("versions", "python tools/version_matrix.py")
    if isinstance(made, str):
        return made
    rows = ([row["torch"], row["transformers"], row["triton"] or "none", row["python"], row["device"],
             f"{row['date']}, {row['commit']}",
             f"{row['passed']} passed, {row['skipped']} skipped, {len(row['failed'])} failed" + _names(row["failed"]),
             "all" if row["tests"] == ["tests"] else " ".join(t.removeprefix("tests/") for t in row["tests"])]
            for row in made)
    return table(["torch", "transformers", "triton", "Python", "device", "date, commit", "result", "tests"], rows)


def fuzz() -> str:
    """Cases that the fuzz tests tried (docs/fuzz.json), and the faults that they found (tests/**/test_*faults.py)."""
    made = _kept("fuzz", "FUSION_PASS_FUZZ=10 FUSION_PASS_FUZZ_RECORD=docs/fuzz.json python -m pytest ...")
    if isinstance(made, str):
        return made
    rows = ([what, str(entry["cases"]), entry["torch"], entry["date"]] for what, entry in sorted(made.items()))
    tests = [path.read_text() for path in sorted(ROOT.glob("tests/**/test_*faults.py"))]
    said = re.compile(r'^def test_\w+\(.*?\):\n    """(.*?)"""', re.M | re.S)
    faults = [f"- {' '.join(text.split())}" for test in tests for text in said.findall(test)]
    return (table(["what", "cases", "torch", "date"], rows)
            + f"\n\nFound and fixed, each with a regression test ({len(faults)}):\n\n" + "\n".join(faults))


def coverage() -> str:
    """Coverage of the pass and the host side of the kernels (docs/coverage.json, by tools/coverage_figure.py)."""
    made = _kept("coverage", "python tools/coverage_figure.py coverage.json TESTS")
    if isinstance(made, str):
        return made
    parts = made["parts"].items()
    rows = ([f"`{part}`", str(count), f"{covered / count:.0%}"] for part, (count, covered) in parts if count)
    return (table(["part", "statements", "covered"], rows)
            + f"\n\n{made['date']}, on a CPU, by `coverage run -m pytest {' '.join(made['tests'])}`.")


def soak() -> str:
    """Decode steps through one CUDA graph that were compared with eager calls (docs/soak.json, by the test)."""
    made = _kept("soak", "FUSION_PASS_SOAK_RECORD=docs/soak.json python -m pytest tests/kernels/test_soak.py")
    if isinstance(made, str):
        return made
    rows = ([row["form"], str(row["tokens"]), str(row["steps"]), str(row["different"])] for row in made["rows"])
    return (f"`{made['test']}` on {made['device']}, torch {made['torch']}, {made['date']}:\n\n"
            + table(["cache", "tokens", "steps", "steps that differ from eager"], rows))


def newcomer() -> str:
    """Seconds of the newcomer's path (docs/newcomer.json, by tools/newcomer.py)."""
    made = _kept("newcomer", "python tools/newcomer.py --record")
    if isinstance(made, str):
        return made
    rows = ([f"`{step['step']}`", f"{step['seconds']:.1f}"] for step in made["steps"])
    pinned = ", versions pinned by `.ci/constraints.txt`" if made.get("pinned") else ""
    return (f"{made['cores']} CPU cores (load {made['load']}), Python {made['python']}, {made['date']}{pinned}:\n\n"
            + table(["step", "seconds"], rows))


BLOCKS: dict[str, Callable[[], str]] = {
    "graph": graph, "report": report, "config": config, "declared": declared, "corpus": corpus, "roles": roles,
    "errors": errors, "compiled": compiled, "versions": versions, "fuzz": fuzz, "soak": soak, "coverage": coverage,
    "newcomer": newcomer,
    "tensor-parallel": tensor_parallel, "benchmarks": benchmarks,
    "benchmarks-main": functools.partial(benchmarks, "chain", "model"),
    "variants": variants, "targets": targets,
    "sources": lambda: result_blocks.sources(_read), "how-fast": lambda: result_blocks.how_fast(_read),
    "decode-step": lambda: result_blocks.decode_step(_read),
    "measured-attention": lambda: result_blocks.measured_attention(_read),
    "measured-pages": lambda: result_blocks.measured_pages(_read),
    "measured-product": lambda: result_blocks.measured_product(_read),
    "measured-rotation": lambda: result_blocks.measured_rotation(_read),
}
_BLOCK = re.compile(r"(<!-- begin ([\w-]+)[^>]*-->\n).*?(<!-- end \2 -->)", re.S)


def bodies(text: str) -> list[tuple[str, str, str]]:
    """(begin comment, name, what stands between) of every block."""
    return [(m[1], m[2], text[m.end(1):m.start(3)]) for m in _BLOCK.finditer(text)]


def filled(text: str, made: dict[str, str]) -> str:
    """The text with its blocks filled; ``made`` keeps what was made already. Raises KeyError for an unknown block."""
    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in made:
            made[name] = BLOCKS[name]()
        return f"{match[1]}{made[name]}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    arguments = parser.parse_args(argv)
    made: dict[str, str] = {}
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        new = filled(text, made)
        if new != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not arguments.check:
                path.write_text(new)
    for name in stale:
        print(("stale: " if arguments.check else "wrote ") + name)
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
