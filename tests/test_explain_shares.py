"""The share of a graph's operations and traffic outside of the fused chains, by part of the model."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import fusion_pass
from fusion_pass import Report
from fusion_pass.details import Cost, GraphDetail
from fusion_pass.explain_html import page
from fusion_pass.explain_shares import percent, shares, words
from fusion_pass.explain_text import text
from fusion_pass.parts import PARTS, part_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain_attention.py"


class Indexer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.wq(x)


class SparseMoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=False)
        self.down = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.down(x) * self.gate(x).softmax(-1).amax(-1, keepdim=True)


class Attention(nn.Module):
    """The example's attention and what stands around it in DeepSeek-V4, each by its usual name."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.indexer = Indexer()
        self.kv_compressor = nn.Linear(64, 128, bias=False)
        self.mlp = SparseMoeBlock()
        self.o_b_proj = nn.Linear(64, 256, bias=False)

    def forward(self, args, x):
        return self.attention(*args), self.indexer(x), self.kv_compressor(x), self.mlp(x), self.o_b_proj(x)


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("plain_attention", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(sys.modules, "plain_attention", module)  # Dynamo imports the module of an inlined function
        spec.loader.exec_module(module)
        attention, args = module.example()
        return fusion_pass.explain(Attention(attention))(args, torch.ones(10, 64))


def test_operations_of_every_part(report):
    assert len(report.fused) == 1
    (graph,) = report.details
    assert {part: found.flops for part, found in graph.outside.items()} == {
        "indexer": 2 * 10 * 64 * 32, "compressor": 2 * 10 * 64 * 128, "experts": 2 * 10 * 64 * (4 + 64),
        "other": 2 * 10 * 64 * 256}  # fmt: skip
    found = graph.shares_outside()
    for part in PARTS:
        assert found[part][0] == pytest.approx(graph.outside[part].flops / graph.total.flops)
        assert 0 < found[part][1] < graph.share_of_bytes_outside
    assert sum(flops for flops, _ in found.values()) == pytest.approx(graph.share_of_flops_outside)
    assert sum(traffic for _, traffic in found.values()) == pytest.approx(graph.share_of_bytes_outside)


def test_json_text_and_page_say_it(report):
    (graph,) = report.details
    assert report.to_dict()["details"][0]["outside"]["experts"]["flops"] == 2 * 10 * 64 * 68
    assert Report.from_dict(report.to_dict()) == report
    for column, line in enumerate(("FLOPs outside: ", "traffic outside: ")):
        assert line + words(graph, column) in text(report) and "experts" in words(graph, column)
    written = page(report)
    for part, (flops, traffic) in shares(report.details).items():
        assert f"--p-{part}" in written and f"<td>{percent(flops)}</td><td>{percent(traffic)}</td>" in written


def test_reports_of_before_have_no_parts(report):
    values = report.to_dict()
    del values["details"][0]["outside"]
    old = Report.from_dict(values)
    assert old.details[0].shares_outside() == {} and "outside: " not in text(old) and page(old)


def test_graphs_are_weighed_by_their_work():
    def detail(flops, chains, **outside):
        costs = {part: Cost(flops=outside.get(part, 0), bytes=outside.get(part, 0)) for part in PARTS}
        return GraphDetail(nodes_before=1, nodes_after=1, total=Cost(flops=flops, bytes=flops),
                           in_chains=Cost(flops=chains, bytes=chains), chains=[], outside=costs)  # fmt: skip

    found = shares([detail(300, 100, experts=150, other=50), detail(100, 100)])
    assert found["chains"] == pytest.approx((0.5, 0.5)) and found["experts"] == pytest.approx((0.375, 0.375))
    assert found["indexer"] == (0, 0) and sum(flops for flops, _ in found.values()) == pytest.approx(1)
    assert percent(0.004) == "<1%" and percent(0) == "0%"


@pytest.mark.parametrize("path, kind, part", [
    ("L['self'].layers[0].attn.compressor.indexer", "some.module.Indexer", "indexer"),
    ("layers.0.attn.compressor.kv_norm", "RMSNorm", "compressor"),
    ("layers.0.mlp", nn.Linear, "other"),
    ("layers.0.ffn", "x.DeepseekV4SparseMoeBlock", "experts"),
    ("layers.0.mlp.shared_experts.up_proj", nn.Linear, "experts"),
    ("layers.0.remove", "x.Removed", "other"),
])  # fmt: skip
def test_part_by_modules(path, kind, part):
    node = fx.Graph().placeholder("x")
    around = {"a": ("", "x.Model"), "b": (path.rpartition(".")[0], "x.Layer")}
    node.meta["nn_module_stack"] = {**around, "c": (path, kind)}
    assert part_of(node) == part


def test_part_by_source_lines():
    node = fx.Graph().placeholder("x")
    assert part_of(node) == "other", "nothing is known"

    def traced(*frames):
        lines = [f'  File "/m.py", line {n}, in {function}\n    {code}' for n, (function, code) in enumerate(frames)]
        node.meta["stack_trace"] = "\n".join(lines)
        return part_of(node)

    assert traced(("forward", "rows = self.indexer(x)"), ("forward", "q = self.wq(x)")) == "indexer"
    assert traced(("layer", "y = f(x)"), ("moe_forward", "y = x @ w")) == "experts"
    assert traced(("layer", "y = attend(q, kv, indexer(x))"), ("attend", "y = q @ k")) == "other", "not the argument's"
