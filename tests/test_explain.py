"""explain() and rewrite(): what they capture, and that they run, compile and change nothing else."""

import sys

import pytest
import torch
from test_backend import abs_, relu_becomes_abs, stand_in  # noqa: F401  (fixture)
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_pass
from fusion_pass import Config, guarded


class Model(torch.nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.breaks = breaks
        self.calls = 0

    def forward(self, x, cache=None):
        y = torch.relu(self.linear(x))
        if cache is not None:
            cache.append(y)
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.relu(self.linear(y))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    fusion_pass.clear_reports()
    yield
    torch._dynamo.reset()


def test_explain_reports(stand_in):  # noqa: F811
    with torch.no_grad():
        report = fusion_pass.explain(Model())(torch.randn(3, 4))
    assert len(report.fused) == 2 and report.graphs == 1 and not report.notes
    assert not fusion_pass.reports(), "nothing was compiled"


def test_explain_merges_graphs(stand_in):  # noqa: F811
    with torch.no_grad():
        report = fusion_pass.explain(Model(breaks=True))(torch.randn(3, 4))
    assert len(report.fused) == 2 and report.graphs == 2
    assert any("graph breaks" in note for note in report.notes)


def test_explain_runs_nothing(stand_in):  # noqa: F811
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        computed = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            fake = torch._subclasses.FakeTensor
            if isinstance(out, torch.Tensor) and not isinstance(out, fake) and not out.is_meta and "mm" in str(func):
                Counting.computed += 1
            return out

    model, cache, x = Model(), [], torch.randn(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), Counting():
        model(x)
        assert Counting.computed == 2, "the probe sees real products"
        fusion_pass.explain(model)(x, cache=cache)
    assert Counting.computed == 2 and cache == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_explain_of_a_function_and_dynamic_shapes(stand_in):  # noqa: F811
    with torch.no_grad():
        report = fusion_pass.explain(lambda x: torch.relu(x).sum(), dynamic=True)(torch.randn(3, 4))
    assert len(report.fused) == 1


def test_explain_while_autograd_records(stand_in):  # noqa: F811
    report = fusion_pass.explain(Model())(torch.randn(3, 4))
    assert not report.fused and [chain.gate for chain in report.gated] == [guarded.TRAINING] * 2
    report = fusion_pass.explain(Model().requires_grad_(False))(torch.randn(3, 4))
    assert len(report.fused) == 2, "nothing requires gradients"


def test_explain_again_and_again(stand_in):  # noqa: F811
    model, x = Model(), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(12):
            assert len(fusion_pass.explain(model)(x).fused) == 2
        torch.compile(model, backend="fusion_pass", fullgraph=True, options={"inner": "aot_eager"})(x)
    assert len(fusion_pass.reports()) == 1


def test_explain_says_when_capture_ends_early(stand_in):  # noqa: F811
    class Stops(Model):
        def forward(self, x):
            y = torch.relu(self.linear(x))
            torch._dynamo.graph_break()
            raise ValueError(f"the model's own error at {tuple(y.shape)}")

    with torch.no_grad():
        report = fusion_pass.explain(Stops())(torch.randn(3, 4))
        assert len(report.fused) == 1 and any("capture ended after graph 1:" in note for note in report.notes)
        with pytest.raises(ValueError, match="own error"):
            fusion_pass.explain(Stops(), config=Config(strict=True))(torch.randn(3, 4))


def test_explain_kill_switch(stand_in, monkeypatch):  # noqa: F811
    monkeypatch.setenv("FUSION_PASS_DISABLE", "1")
    with torch.no_grad():
        report = fusion_pass.explain(Model())(torch.randn(3, 4))
    assert not report and report.notes == [guarded.DISABLED]


def test_rewrite_of_a_traced_graph(stand_in):  # noqa: F811
    x = torch.tensor([-1.0, 2.0])
    gm = make_fx(lambda x: torch.relu(x) + 1)(x)
    report = fusion_pass.rewrite(gm)
    assert len(report.fused) == 1 and gm(x).tolist() == [2.0, 3.0]


def test_rewrite_of_an_exported_program(monkeypatch):
    def replacing(gm, config, before_change=None):
        report = relu_becomes_abs(gm, config, before_change)
        output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
        (result,) = output.args[0]
        with gm.graph.inserting_after(result):
            new = gm.graph.call_function(result.target, result.args)
        new.meta = dict(result.meta)
        result.replace_all_uses_with(new)
        gm.graph.erase_node(result)
        return report

    monkeypatch.setattr(sys.modules["fusion_pass.rewrite"], "run_on_graph", replacing)

    class Relu(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x)

    x = torch.tensor([-1.0, 2.0])
    program = torch.export.export(Relu(), (x,)).run_decompositions()
    report = fusion_pass.rewrite(program, Config(strict=True))
    assert len(report.fused) == 1
    output = next(node for node in reversed(program.graph_module.graph.nodes) if node.op == "output")
    assert [spec.arg.name for spec in program.graph_signature.output_specs] == [output.args[0][0].name]
    assert program.module()(x).tolist() == [1.0, 2.0]


def test_failed_rewrite_keeps_an_exported_program_whole(monkeypatch):
    def failing(gm, config, before_change=None):
        relu_becomes_abs(gm, config, before_change)
        raise RuntimeError("broken pass")

    monkeypatch.setattr(sys.modules["fusion_pass.rewrite"], "run_on_graph", failing)
    model = Model().requires_grad_(False)
    x = torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    before = [node.name for node in program.graph_module.graph.nodes]
    assert "broken pass" in fusion_pass.rewrite(program).notes[0]
    assert [node.name for node in program.graph_module.graph.nodes] == before
    torch.testing.assert_close(program.module()(x), model(x))


def test_rewrite_refuses_other_things():
    with pytest.raises(TypeError, match="expected an fx.GraphModule or an ExportedProgram, got Linear"):
        fusion_pass.rewrite(torch.nn.Linear(2, 2))
