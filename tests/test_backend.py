"""The backend's own work, with a stand-in pass that replaces relu by abs: what compiles the graph, caches, failures,
reports.
"""

import logging
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import fusion_pass
from fusion_pass import FusedChain, Report, guarded, store

INNERS = ("inductor", "aot_eager", "eager")
relu, abs_ = torch.ops.aten.relu.default, torch.ops.aten.abs.default


def relu_becomes_abs(gm, config, before_change=None):
    if before_change is not None:
        before_change()
    report = Report(visits=7)
    for node in list(gm.graph.nodes):
        if node.target is relu:
            node.target = abs_
            report.fused.append(FusedChain(roles=("fmha",), op="abs", where="user.py:1"))
    return report


def install_pass(monkeypatch, run_on_graph):
    monkeypatch.setattr(sys.modules["fusion_pass.rewrite"], "run_on_graph", run_on_graph)


@pytest.fixture
def stand_in(monkeypatch):
    install_pass(monkeypatch, relu_becomes_abs)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    fusion_pass.clear_reports()
    monkeypatch.setattr(guarded, "_warned", set())
    with fresh_cache():
        yield
    torch._dynamo.reset()
    fusion_pass.clear_reports()


def function(x):
    return torch.relu(x) * 2


def compiled(**options):
    mode = options.pop("mode", None)
    return torch.compile(function, backend="fusion_pass", options=options or None, mode=mode, fullgraph=True)


X = torch.tensor([-3.0, 5.0])


@pytest.mark.parametrize("inner", INNERS)
def test_graph_is_rewritten_and_reported(stand_in, inner):
    assert compiled(inner=inner)(X).tolist() == [6.0, 10.0]
    (report,) = fusion_pass.reports()
    assert [chain.op for chain in report.fused] == ["abs"] and report.graphs == 1
    assert report.nodes > 0 and report.visits == 7 and report.seconds > 0


@pytest.mark.parametrize("inner", INNERS)
def test_training_graphs_are_refused_and_still_compile(stand_in, inner):
    x = X.clone().requires_grad_()
    y = compiled(inner=inner)(x)
    y.sum().backward()
    assert y.tolist() == [0.0, 10.0] and x.grad.tolist() == [0.0, 2.0]
    (report,) = fusion_pass.reports()
    assert not report and report.notes == [guarded.TRAINING]
    with torch.no_grad():
        assert compiled(inner=inner)(x).tolist() == [6.0, 10.0]


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("how", ["environment", "option"])
def test_kill_switch(stand_in, monkeypatch, inner, how):
    if how == "environment":
        monkeypatch.setenv("FUSION_PASS_DISABLE", "1")
    options = {"disable": True} if how == "option" else {}
    assert compiled(inner=inner, **options)(X).tolist() == [0.0, 10.0]
    assert fusion_pass.reports()[0].notes == [guarded.DISABLED]


def test_kill_switch_gives_exactly_inductors_graph(stand_in, monkeypatch):
    """Same graph, same configuration, hence the same key: Inductor's cache has the code already."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(function)(X)
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setenv("FUSION_PASS_DISABLE", "1")
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert compiled()(X).tolist() == [0.0, 10.0]
    assert counters["inductor"]["fxgraph_cache_hit"] == 1 and counters["inductor"]["fxgraph_cache_miss"] == 0


def test_environment_is_read_when_a_graph_is_compiled(stand_in, monkeypatch):
    run = compiled()
    assert run(X).tolist() == [6.0, 10.0]
    monkeypatch.setenv("FUSION_PASS_DISABLE", "1")
    assert run(X).tolist() == [6.0, 10.0], "a compiled graph stays as it is"
    torch._dynamo.reset()
    assert run(X).tolist() == [0.0, 10.0]


def test_reports_on_cache_hits(stand_in):
    for count in (1, 2):
        torch._dynamo.reset()
        counters.clear()
        assert compiled()(X).tolist() == [6.0, 10.0]
        assert len(fusion_pass.reports()) == count
        assert fusion_pass.reports()[-1].fused[0].op == "abs"
    assert counters["inductor"]["fxgraph_cache_hit"] == 1, "the second compilation takes Inductor's code from the cache"


def test_plain_inductor_never_takes_rewritten_code(stand_in):
    assert compiled()(X).tolist() == [6.0, 10.0]
    torch._dynamo.reset()
    assert torch.compile(function)(X).tolist() == [0.0, 10.0]
    torch._dynamo.reset()
    assert compiled()(X).tolist() == [6.0, 10.0]


def test_one_report_per_compiled_graph(stand_in):
    run = torch.compile(function, backend="fusion_pass", dynamic=False, options={"inner": "aot_eager"})
    run(X), run(torch.ones(3)), run(torch.ones(3))
    assert [report.graphs for report in fusion_pass.reports()] == [1, 1]


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("half_done", [False, True])
def test_failing_pass_leaves_the_graph_alone(monkeypatch, caplog, inner, half_done):
    def failing(gm, config, before_change=None):
        if half_done:
            relu_becomes_abs(gm, config, before_change)
            node = next(node for node in gm.graph.nodes if node.op == "call_function")
            with gm.graph.inserting_before(node):
                gm.graph.call_function(abs_, (node,))  # used before it is defined
        raise RuntimeError("broken pass")

    install_pass(monkeypatch, failing)
    with caplog.at_level(logging.WARNING, logger="fusion_pass"):
        assert compiled(inner=inner)(X).tolist() == [0.0, 10.0]
        assert compiled(inner=inner)(torch.ones(3)).tolist() == [2.0] * 3
    assert len([record for record in caplog.records if "broken pass" in record.getMessage()]) == 1
    assert "broken pass" in fusion_pass.reports()[0].notes[0]


def test_strict_raises(monkeypatch):
    def failing(gm, config, before_change=None):
        raise RuntimeError("broken pass")

    install_pass(monkeypatch, failing)
    with pytest.raises(Exception, match="broken pass"):
        compiled(strict=True, inner="aot_eager")(X)


def test_malformed_result_is_undone(monkeypatch):
    def breaking(gm, config, before_change=None):
        report = relu_becomes_abs(gm, config, before_change)
        first = next(node for node in gm.graph.nodes if node.op == "call_function")
        last = list(gm.graph.nodes)[-2]
        first.args = (last,)  # a cycle: lint finds it
        return report

    install_pass(monkeypatch, breaking)
    assert compiled(inner="aot_eager")(X).tolist() == [0.0, 10.0]
    assert not fusion_pass.reports()[0].fused


@pytest.mark.parametrize(
    "options, nearest", [({"strct": True}, "strict"), ({"triton.cudagraph": True}, "triton.cudagraphs")]
)
def test_unknown_option_is_a_value_error(options, nearest):
    with pytest.raises(ValueError, match=nearest):
        torch.compile(function, backend="fusion_pass", options=options)(X)


def test_unknown_mode_and_bad_value_are_value_errors():
    with pytest.raises(ValueError, match="unknown mode 'fast'"):
        compiled(mode="fast")(X)
    with pytest.raises(ValueError, match="kv_split"):
        compiled(kv_split=3)(X)
    with pytest.raises(ValueError, match="max_autotune"):
        compiled(max_autotune="yes")(X)


@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"triton.cudagraphs": False}, {"epilogue_fusion": False}]
)
def test_modes_and_inductor_options_pass_through(stand_in, options):
    seen = {}

    class Probe(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen["cudagraphs"] = torch._inductor.config.triton.cudagraphs
            seen["epilogue_fusion"] = torch._inductor.config.epilogue_fusion

        def uuid(self):
            return "probe"

    options = dict(options)
    mode = options.pop("mode", None)
    with torch._inductor.config.patch(post_grad_custom_post_pass=Probe()):
        run = torch.compile(function, backend="fusion_pass", mode=mode, options=options or None)
        assert run(X).tolist() == [6.0, 10.0]
    assert seen["cudagraphs"] is (mode == "reduce-overhead")
    assert seen["epilogue_fusion"] is options.get("epilogue_fusion", True)


def test_mode_may_stand_among_the_options(stand_in):
    run = torch.compile(function, backend="fusion_pass", options={"mode": "reduce-overhead", "strict": True})
    assert run(X).tolist() == [6.0, 10.0]


def test_a_joint_pass_of_the_user_still_runs(stand_in):
    calls = []

    class Theirs(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            calls.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

        def uuid(self):
            return "theirs"

    theirs = Theirs()
    with torch._inductor.config.patch(joint_custom_pre_pass=theirs):
        assert compiled()(X).tolist() == [6.0, 10.0]
        assert torch._inductor.config.joint_custom_pre_pass is theirs
    assert len(calls) == 1 and "aten.abs.default" in calls[0]


def test_dynamic_shapes(stand_in):
    run = torch.compile(function, backend="fusion_pass", dynamic=True, fullgraph=True, options={"inner": "aot_eager"})
    assert run(X).tolist() == [6.0, 10.0] and run(torch.tensor([-1.0, 2.0, -3.0])).tolist() == [2.0, 4.0, 6.0]
    assert len(fusion_pass.reports()) == 1


def test_logs_and_counters(stand_in, caplog):
    counters.clear()
    with caplog.at_level(logging.DEBUG, logger="fusion_pass"):
        compiled(inner="aot_eager")(X)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "aot graph: 1 fused" in text and "fused      fmha at user.py:1" in text
    assert counters["fusion_pass"]["fused"] == 1 and counters["fusion_pass"]["graphs"] == 1


def test_structured_trace(stand_in, monkeypatch):
    artifacts = {}
    monkeypatch.setattr(
        fusion_pass.compat, "trace_artifact", lambda name, encoding, payload: artifacts.update({name: payload()})
    )
    compiled(inner="aot_eager")(X)
    assert '"op": "abs"' in artifacts["fusion_pass_report"]
    assert "aten.relu" in artifacts["fusion_pass_before"] and "aten.relu" not in artifacts["fusion_pass_after"]


def test_nested_collectors_stay_apart():
    with store.collect() as outer:
        with store.collect() as inner:
            store.add(Report(notes=["inner"]))
        store.add(Report(notes=["outer"]))
    assert [report.notes for report in inner] == [["inner"]] and [report.notes for report in outer] == [["outer"]]
    assert not fusion_pass.reports()
