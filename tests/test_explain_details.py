"""Sub-graphs and estimates that explain gives, the HTML page, and the advice for near misses."""

import html.parser
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_pass
from fusion_pass import FusedChain, GatedChain, NearMiss, Report
from fusion_pass.advice import advice
from fusion_pass.details import cost, line
from fusion_pass.explain_html import page

ROOT = Path(__file__).parents[1]


def plain():
    spec = importlib.util.spec_from_file_location("plain_attention", ROOT / "examples" / "plain_attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def explain(target):
    model, args = target()
    with torch.no_grad():
        return fusion_pass.explain(model)(*args)


@pytest.fixture(scope="module")
def report():
    return explain(plain().example)


def test_estimates_of_known_graphs():
    x = torch.ones(4, 8)
    pointwise = make_fx(lambda x: torch.relu(x + 1) * 2)(x).graph
    found = cost(pointwise.nodes)
    assert (found.least, found.most) == (1, 3), "one fused kernel, or one each"
    assert found.bytes == 2 * x.numel() * 4, "read once, written once"
    product = make_fx(lambda a, b: torch.relu(a @ b).t())(x, torch.ones(8, 16)).graph
    found = cost(product.nodes)
    assert (found.least, found.most, found.flops) == (2, 2, 2 * 4 * 8 * 16), "a view is no kernel"
    assert found.bytes == 4 * (4 * 8 + 8 * 16 + 3 * 4 * 16), "the product is written, read, and written again"
    split = make_fx(lambda x: x[:2] + x[2:])(x).graph
    assert cost(split.nodes).bytes == 4 * (32 + 16), "both halves are read, each once"


def test_chain_detail(report):
    (graph,), (chain,) = report.details, report.details[0].chains
    before, after = "\n".join(chain.before), "\n".join(chain.after)
    assert chain.index == 0 and "_softmax" in before and "fusion_pass." not in before
    assert "fusion_pass.attention_rope(" in after and "_softmax" not in after
    assert "bmm_2: bf16[2, 16, 128]" in before and "bmm_2: bf16[2, 16, 128]" in after, "the projection is on both sides"
    assert chain.cost_after.least < chain.cost_before.least and chain.cost_after.bytes < chain.cost_before.bytes
    # Products of scores, values and projection: 2 * (S*H * S * D) * 2 and 2 * S * G * K * R.
    assert chain.cost_before.flops == 2 * 2 * 16 * 8 * 16 * 512 + 2 * 16 * 2 * 2048 * 128
    assert graph.share_of_flops_outside == 0 and 0 <= graph.share_of_bytes_outside < 0.1


def test_details_survive_json_and_merging(report):
    again = Report.from_dict(report.to_dict())
    assert again.details == report.details and again.to_json() == report.to_json()
    merged = Report.merge([report, report])
    assert [c.index for g in merged.details for c in g.chains] == [0, 1]


def test_symbolic_sizes():
    model, args = plain().example()
    with torch.no_grad():
        found = fusion_pass.explain(model, dynamic=True)(*args)
    assert len(found.fused) == 1 and found.details[0].chains[0].cost_before.bytes > 0


def test_near_misses_name_the_reader():
    (miss,) = explain(plain().keeps_rotated).near_misses
    assert "escapes the chain" in miss.reason and "output" in miss.reason
    assert re.search(r"plain_attention\.py:\d+$", miss.where), "the graph's output has no line: the chain's"
    assert "otherwise compute it from" in advice(miss)


class Tags(html.parser.HTMLParser):
    """Checks that tags are closed in order and collects text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.tags = [], [], []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_of_a_fused_chain(report):
    text = page(report, "a <title> & more")
    seen = Tags(text)
    words = "".join(seen.text)
    assert "a <title> & more" in words, "escaped, so that it comes back as text"
    assert re.search(r"plain_attention\.py:\d+", words) and 'torch.einsum("bsgk,grk->bsgr"' in words
    for name in ("Sub-graph before and after", "kernel launches saved", "memory traffic", "attention_rope", "gate"):
        assert name in words
    names = [tag for tag, _ in seen.tags]
    assert names.count("svg") == 2 and "script" not in names, "one picture for wide windows, one for narrow ones"
    assert all("aria-label" in attrs for tag, attrs in seen.tags if tag == "svg")
    assert not re.search(r"https?://|@import|url\(|<link|\bsrc=", text), "self-contained"
    assert "prefers-color-scheme: dark" in text and "max-width: 720px" in text


def test_page_of_everything_else():
    roles = ("fmha", "kv_merge", "inverse_rope", "fp8_quant", "bgemm")
    report = Report(
        fused=[FusedChain(roles=roles, quant="ue8m0", group=128, where="x.py:no number",
                          op="fusion_pass.merge_partials_rope_quant + fusion_pass.fp8_bgemm", gate="<yes>")],
        gated=[GatedChain(roles=roles[2:], gate="float64: would lose precision", where="/absent/model.py:7")],
        near_misses=[NearMiss(role="fmha", reason="values come from a, keys from b: they are not the same rows")],
        notes=["a <note>"])
    words = "".join(Tags(page(report)).text)
    for part in ("<yes>", "a <note>", "/absent/model.py:7", "pass the same tensor to both", "bf16, fp16 or fp32",
                 "ue8m0 scales, 1 x 128", "merge_partials_rope_quant", "source line unknown"):
        assert part in words, part
    assert "saved" not in words, "no estimates without details"
    assert "compiled as it is" in "".join(Tags(page(Report())).text)


def test_line_names_types_and_operands():
    graph = make_fx(lambda x: (x.half(), torch.cat([x, x])))(torch.ones(2, 3)).graph
    lines = [line(n) for n in graph.nodes if n.op == "call_function"]
    assert any(re.fullmatch(r"_to_copy: f16\[2, 3\] = aten\._to_copy\(x_1, dtype=f16\)", x) for x in lines), lines
    assert any("f32[4, 3] = aten.cat([x_1, x_1])" in x for x in lines), lines


def test_every_near_miss_gets_advice():
    for role in fusion_pass.report.ROLES:
        assert "register_pattern" in advice(NearMiss(role=role, reason="?")) or role == "bgemm"
    assert "grouped product" in advice(NearMiss(role="bgemm", reason="?"))
    assert "no_grad" in advice(GatedChain(roles=("bgemm",), gate="training graph: left alone"))
    assert "negative angle" in advice(NearMiss(role="inverse_rope", reason="this is the forward rotation"))


def test_layers_that_are_alike_share_a_card():
    chain = dict(roles=("fmha", "inverse_rope", "bgemm"), op="fusion_pass.attention_rope", gate="",
                 quant=None, group=None)
    report = Report(fused=[FusedChain(where="m.py:1", **chain), FusedChain(where="m.py:2", **chain),
                           FusedChain(where="m.py:1", **chain)])
    text = page(report)
    assert text.count('class="card fused"') == 2 and text.count("(2 alike)") == 1


def test_the_place_is_the_users_own():
    """Lines of this package (its FP8 linear layer) and of torch are passed over, where somebody else called them."""
    from pathlib import Path

    from fusion_pass.recognise.refusal import source_line

    node = torch.fx.Graph().placeholder("x")
    layer = str(Path(fusion_pass.__file__).parent / "models" / "fp8_linear.py")
    frames = [("/home/me/model.py", 7), (layer, 113), ("/site-packages/torch/nn/modules/module.py", 9)]
    text = "".join(f'  File "{path}", line {number}, in forward\n    y = f(x)\n' for path, number in frames)
    node.meta["stack_trace"] = text
    assert source_line(node) == "/home/me/model.py:7"
    node.meta["stack_trace"] = text.replace("/home/me/model.py", "/site-packages/torch/x.py")
    assert source_line(node) == f"{layer}:113"
    elsewhere = "/srv/torch/env/lib/python3/site-packages/transformers/model.py"
    text = text.replace("/home/me/model.py", elsewhere).replace("/site-packages/torch", torch.__path__[0])
    node.meta["stack_trace"] = text
    assert source_line(node) == f"{elsewhere}:7", "a folder called torch is not torch"


def test_text_has_estimates_advice_and_on_demand_the_graphs(report):
    from fusion_pass.explain_text import text

    short, long = text(report), text(report, graphs=True)
    assert short.startswith(str(report)) and len(long.splitlines()) > len(short.splitlines()) + 20
    assert re.search(r"chain 0  launches \d+ to \d+ before, \d+ after; memory traffic [\d.]+ MiB before", short)
    assert re.search(r"outside of the chains \d+% of [\d.]+ MFLOP and \d+% of", short)
    assert "fusion_pass.attention_rope(" in long and "fusion_pass.attention_rope(" not in short
    plain = text(Report(near_misses=[NearMiss(role="fmha", reason="values come from a: they are not the same rows")]))
    assert "to fix     fmha: The fused attention reads one latent row" in plain and "estimates" not in plain


def test_json_says_what_to_do():
    report = Report(near_misses=[NearMiss(role="fmha", reason="they are not the same rows")],
                    gated=[GatedChain(roles=("inverse_rope", "bgemm"), gate="float64: would lose precision")])
    values = report.to_dict()
    assert "pass the same tensor to both" in values["near_misses"][0]["advice"]
    assert "bf16" in values["gated"][0]["advice"] and Report.from_dict(values) == report
