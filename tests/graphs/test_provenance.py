# SPDX-License-Identifier: Apache-2.0
"""Where a fused node came from: in its metadata, in torch's own records of passes, and in what tlparse shows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import chains
import pytest
import torch

import fusion_pass

ROOT = Path(__file__).parents[2]
TLPARSE = shutil.which("tlparse")


def rewritten(function):
    """(the graph's nodes by name as it came, with targets; the nodes of the rewritten graph that the pass made)."""
    gm = chains.aot(function, chains.inputs(dtype=torch.float32))
    before = {node.name: str(node.target) for node in gm.graph.nodes}
    with torch.no_grad():
        assert len(fusion_pass.rewrite(gm).fused) == 1
    return before, [node for node in gm.graph.nodes if "fusion_pass" in node.meta]


def test_metadata_of_fused_nodes():
    before, nodes = rewritten(chains.chain)
    ops = [node for node in nodes if "fusion_pass" in str(node.target)]
    assert len(ops) == 1
    for node in nodes:
        kept = node.meta["fusion_pass"]
        assert kept["roles"] == ("fmha", "inverse_rope", "bgemm") and kept["op"] == "fusion_pass.attention_rope"
        assert "chains.py" in node.meta["stack_trace"] and "project" in node.meta["stack_trace"]
        sources = node.meta["from_node"]
        assert [source.pass_name for source in sources] == ["fusion_pass"] * len(sources)
        assert {source.name: source.target for source in sources}.items() <= before.items()
    attention, rotated = ops[0].meta["from_node"]
    assert attention.target == "aten.bmm.default" and rotated.name in before
    captured = [source.name for source in attention.from_node]
    assert captured == ["einsum_1"], "and on to the node that Dynamo captured"


def test_the_fp8_product_stands_for_the_sources_product():
    from fusion_pass.models import FP8GroupedLinear

    weight = torch.randn(chains.GROUPS * 128, chains.HEADS // chains.GROUPS * chains.DIM)
    linear = FP8GroupedLinear.from_linear(weight, chains.GROUPS)

    def chain(q, kv, mask, sink, cos, sin, _):
        o = chains.rotate(chains.attention(q, kv, mask, sink), cos, sin)
        return linear(o.reshape(*o.shape[:2], chains.GROUPS, -1))

    before, nodes = rewritten(chain)
    (product,) = [node for node in nodes if "fp8_bgemm" in str(node.target)]
    assert len(product.meta["from_node"]) >= 3, "attention, rotation, product"


PROGRAM = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
import chains, fusion_pass, torch
with torch.no_grad():
    torch.compile(chains.chain, backend="fusion_pass", options={{"inner": "aot_eager"}})(*chains.inputs())
"""


@pytest.mark.skipif(TLPARSE is None, reason="needs tlparse, torch's viewer of structured traces (pip install tlparse)")
def test_tlparse_shows_report_and_graphs(tmp_path):
    program = PROGRAM.format(root=str(ROOT), here=str(Path(__file__).parent))
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path / "trace")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, cwd=tmp_path)
    (log,) = (tmp_path / "trace").glob("*.log")
    subprocess.run([TLPARSE, str(log), "-o", str(tmp_path / "shown"), "--no-browser"], check=True, capture_output=True)
    shown = {name: next((tmp_path / "shown").rglob(f"fusion_pass_{name}_*")) for name in ("report", "before", "after")}
    page = (tmp_path / "shown" / "index.html").read_text()
    assert all(path.name in page for path in shown.values()), "linked on the page"
    assert json.loads(shown["report"].read_text())["fused"][0]["op"] == "fusion_pass.attention_rope"
    assert "softmax" in shown["before"].read_text() and "attention_rope" in shown["after"].read_text()
