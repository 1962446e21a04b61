"""Declared ops at other levels than torch.compile's eager inners: make_fx, export, Inductor; and what they cost."""

import sys

import engine_ops
import pytest
import torch
from fusion_pass.patterns import opaque
from o_path import HALF, HEAD_DIM, Path, assert_close
from test_opaque_engines import padded_attention, trt_path, vllm_path
from test_opaque_libraries import grouped_path, sparse_path
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_pass
from fusion_pass import Config
from fusion_pass.recognise.declared import DeclaredOps

TAIL = ("inverse_rope", "fp8_quant", "bgemm")


def ops_of(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def test_rewrite_of_a_make_fx_graph():
    engine_ops.finegrained()
    p = Path()
    fn, args = grouped_path(p, torch.ops.finegrained_fp8.matmul_grouped)
    gm = make_fx(fn)(*args)
    report = fusion_pass.rewrite(gm, Config(strict=True))
    assert [c.roles for c in report.fused] == [TAIL], report
    assert not any("finegrained" in op for op in ops_of(gm))
    assert_close(gm(*args), fn(*args))


def test_rewrite_of_a_make_fx_graph_that_is_not_functional():
    """In-place ops stay: the graph says when a buffer changes, the written-out form would not."""
    engine_ops.trtllm()
    p = Path()
    fn, args = trt_path(p)
    gm = make_fx(fn)(*args)
    before = ops_of(gm)
    report = fusion_pass.rewrite(gm, Config(strict=True))
    assert not report.fused and ops_of(gm) == before
    assert any("functionalise" in note for note in report.notes), report
    assert_close(gm(*args), fn(*args))


@pytest.mark.parametrize("dynamic", [False, True])
def test_rewrite_of_an_exported_program(dynamic):
    engine_ops.finegrained()
    p = Path(tokens=6)
    fn, args = grouped_path(p, torch.ops.finegrained_fp8.matmul_grouped)

    class Module(torch.nn.Module):
        def forward(self, *args):
            return fn(*args)

    tokens = torch.export.Dim("tokens", min=2, max=64)
    shapes = {"args": ({0: tokens},) * 3 + (None,) * 3} if dynamic else None
    program = torch.export.export(Module(), args, dynamic_shapes=shapes).run_decompositions()
    report = fusion_pass.rewrite(program, Config(strict=True))
    assert [c.roles for c in report.fused] == [TAIL], report
    assert not any("finegrained" in op for op in ops_of(program.graph_module))
    for count in (6, 3, 9) if dynamic else (6,):
        other, inputs = grouped_path(Path(tokens=count), torch.ops.finegrained_fp8.matmul_grouped)
        inputs = (*inputs[:3], *args[3:])
        assert_close(program.module()(*inputs), other(*inputs))


@pytest.mark.slow
def test_inductor():
    engine_ops.vllm()
    p = Path()
    fn, args = vllm_path(p, padded_attention(p))
    torch._dynamo.reset()
    before = len(fusion_pass.reports())
    with torch.no_grad():
        out = torch.compile(fn, backend="fusion_pass", options={"strict": True})(*args)
    report = fusion_pass.Report.merge(fusion_pass.reports()[before:])
    assert [c.roles for c in report.fused] == [TAIL], report
    assert_close(out, fn(*args))


def test_a_second_reader_of_the_attention_keeps_the_declared_op():
    """Written out and recognised, but not to be replaced: the graph is as it came."""
    engine_ops.sparse_attention()
    chain, args = sparse_path(Path(), torch.ops.someones_model.sparse_attn)

    def fn(*args):
        o = torch.ops.someones_model.sparse_attn(*args[:4], HEAD_DIM ** -0.5)
        tail = torch.view_as_complex(o[..., -64:].float().unflatten(-1, (-1, 2))) * args[4].conj().view(1, -1, 1, HALF)
        x = torch.cat((o[..., :-64], torch.view_as_real(tail).flatten(-2).to(o.dtype)), -1)
        return torch.einsum("bsgd,grd->bsgr", x.view(*o.shape[:2], 2, -1), args[5]), o + 1

    gm = make_fx(fn)(*args)
    want = fn(*args)
    report = fusion_pass.rewrite(gm, Config(strict=True))
    assert [c.roles for c in report.fused] in ([], [("inverse_rope", "bgemm")]), report
    assert ops_of(gm).count("someones_model.sparse_attn.default") == 1
    assert not any("softmax" in op for op in ops_of(gm)), "written out beside the op itself"
    for found, one in zip(gm(*args), want):
        assert_close(found, one)


def test_a_failure_leaves_the_graph_as_it_came(monkeypatch):
    engine_ops.finegrained()
    fn, args = grouped_path(Path(), torch.ops.finegrained_fp8.matmul_grouped)
    gm = make_fx(fn)(*args)
    before = gm.print_readable(print_output=False)
    monkeypatch.setattr(DeclaredOps, "settle", lambda self, *others: 1 / 0)
    report = fusion_pass.rewrite(gm)
    assert not report.fused and any("ZeroDivisionError" in note for note in report.notes)
    assert gm.print_readable(print_output=False) == before


def test_graphs_without_declared_ops_are_not_touched(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("no declared op here")
    monkeypatch.setattr(sys.modules["fusion_pass.rewrite"], "snapshot", fail)
    gm = make_fx(lambda x: (x * 2).relu() @ x)(torch.randn(4, 4))
    report = fusion_pass.rewrite(gm, Config(strict=True))
    assert not report and not report.notes


def test_table():
    """Every row names its roles in dataflow order, its versions and its source, and no name twice."""
    order = fusion_pass.report.ROLES
    for row in opaque.ROWS:
        assert row.roles and list(row.roles) == sorted(row.roles, key=order.index)
        assert row.versions and row.source and "::" in row.name
    names = [row.name for row in opaque.ROWS]
    assert len(names) == len(set(names))
    with pytest.raises(ValueError, match="declared already"):
        opaque.add(opaque.ROWS[0])
    assert opaque.declared(torch.ops.aten.mm.default) is None


def test_list_patterns(capsys):
    import json

    from fusion_pass.cli.main import main
    assert main(["list-patterns", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed["roles"]] == list(fusion_pass.report.ROLES)
    assert {op["name"] for op in listed["declared_ops"]} == {row.name for row in opaque.ROWS}
    assert main(["list-patterns"]) == 0
    text = capsys.readouterr().out
    assert "vllm::deepseek_v4_fp8_einsum" in text and "(Tensor o, Tensor cos, Tensor sin) -> Tensor" in text
