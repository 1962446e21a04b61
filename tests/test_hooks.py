"""The pass in Inductor's hooks: composing with what is there, cache keys, reports on cache hits."""

import pickle
import sys

import pytest
import torch
from test_backend import X, fresh, function, relu_becomes_abs, stand_in  # noqa: F401  (fixtures)
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusion_pass
from fusion_pass import Config, compat, fingerprint, guarded, hooks

inductor = torch._inductor.config


class Theirs(CustomGraphPass):
    """A pass of somebody else."""

    def __init__(self, name="theirs"):
        self.name, self.calls = name, []

    def __call__(self, graph):
        self.calls.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

    def uuid(self):
        return self.name


@pytest.fixture(autouse=True)
def empty_slot():
    with inductor.patch(post_grad_custom_pre_pass=None):
        yield


def compile_and_run():
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(function)(X).tolist()


def test_enabled(stand_in):  # noqa: F811
    with fusion_pass.enabled():
        assert compile_and_run() == [6.0, 10.0]
    assert inductor.post_grad_custom_pre_pass is None
    assert compile_and_run() == [0.0, 10.0], "outside of the context, and not from the cache either"
    assert [len(report.fused) for report in fusion_pass.reports()] == [1]


def test_install_and_uninstall(stand_in):  # noqa: F811
    fusion_pass.install()
    fusion_pass.install(Config(strict=True))
    assert compile_and_run() == [6.0, 10.0] and len(fusion_pass.reports()) == 1, "installed once, not twice"
    fusion_pass.uninstall()
    fusion_pass.uninstall()
    assert inductor.post_grad_custom_pre_pass is None
    assert compile_and_run() == [0.0, 10.0]


def test_composes_with_a_pass_that_is_there(stand_in):  # noqa: F811
    theirs = Theirs()
    inductor.post_grad_custom_pre_pass = theirs
    fusion_pass.install()
    assert compile_and_run() == [6.0, 10.0]
    assert len(theirs.calls) == 1 and "aten.relu.default" in theirs.calls[0], "it sees the graph it would have seen"
    fusion_pass.uninstall()
    assert inductor.post_grad_custom_pre_pass is theirs


def test_uninstall_keeps_what_came_later(stand_in):  # noqa: F811
    first, second = Theirs("first"), Theirs("second")
    inductor.post_grad_custom_pre_pass = first
    fusion_pass.install()
    inductor.post_grad_custom_pre_pass = hooks.with_pass(inductor.post_grad_custom_pre_pass, second)
    fusion_pass.uninstall()
    assert compile_and_run() == [0.0, 10.0] and len(first.calls) == len(second.calls) == 1


def test_single_slot_of_older_torch(stand_in, monkeypatch):  # noqa: F811
    monkeypatch.setattr(compat, "supports_pass_lists", lambda: False)
    theirs = Theirs()
    inductor.post_grad_custom_pre_pass = theirs
    with fusion_pass.enabled():
        slot = inductor.post_grad_custom_pre_pass
        assert isinstance(slot, hooks.CompositePass) and isinstance(slot, CustomGraphPass)
        assert slot.uuid() and slot.uuid() != theirs.uuid()
        assert compile_and_run() == [6.0, 10.0] and len(theirs.calls) == 1
        fusion_pass.install()
        assert len(inductor.post_grad_custom_pre_pass.passes) == 2
        fusion_pass.uninstall()
        assert inductor.post_grad_custom_pre_pass is theirs


def test_composite_of_a_plain_callable_is_not_cached():
    composite = hooks.CompositePass([lambda graph: None, hooks.PostGradPass(Config())])
    assert composite.uuid() is None, "as Inductor treats a plain callable"


def test_older_torch_tells_inference_by_the_callers_frame():
    def post_grad_passes(gm, is_inference):
        return compat.post_grad_is_inference()

    assert post_grad_passes(None, True) is True and post_grad_passes(None, False) is False
    assert compat.post_grad_is_inference() is None


def test_training_graphs_are_refused(stand_in):  # noqa: F811
    x = X.clone().requires_grad_()
    with fusion_pass.enabled():
        torch.compile(function)(x).sum().backward()
    assert x.grad.tolist() == [0.0, 2.0]
    assert [report.notes for report in fusion_pass.reports()] == [[guarded.TRAINING]]


def test_report_comes_back_on_a_cache_hit(stand_in):  # noqa: F811
    with fusion_pass.enabled():
        assert compile_and_run() == [6.0, 10.0]
        counters.clear()
        assert compile_and_run() == [6.0, 10.0]
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    first, second = fusion_pass.reports()
    assert second.fused == first.fused and second.notes == ["compiled graph came from a cache"]


def test_other_configuration_is_another_key(stand_in, monkeypatch):  # noqa: F811
    seen = []
    inner = sys.modules["fusion_pass.rewrite"].run_on_graph

    def recording(gm, config, before_change=None):
        seen.append(config.kv_split)
        return inner(gm, config, before_change)

    monkeypatch.setattr(sys.modules["fusion_pass.rewrite"], "run_on_graph", recording)
    for kv_split in (1, 2):
        with fusion_pass.enabled(Config(kv_split=kv_split)):
            compile_and_run()
    monkeypatch.setenv("FUSION_PASS_KV_SPLIT", "1")
    with fusion_pass.enabled(Config(kv_split=2)):
        compile_and_run()
    assert seen == [1, 2], "a key per effective configuration: the third compilation equals the first"


def test_fingerprint_depends_on_everything(monkeypatch):
    def now(config=None):
        return fingerprint.fingerprint(config or Config(), "post_grad")

    before = {now(), fingerprint.fingerprint(Config(), "joint"), now(Config(strict=True))}
    monkeypatch.setenv("FUSION_PASS_DISABLE_RULES", "fp8_quant")
    before.add(now())
    monkeypatch.delenv("FUSION_PASS_DISABLE_RULES")
    for name in ("sources", "registered_patterns"):
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, name, lambda: "changed")
            before.add(now())
    for name in ("_versions", "_architectures"):
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, name, lambda: ("changed",))
            before.add(now())
    assert len(before) == 8 and now() in before, "equal inputs, equal fingerprint"


def test_sources_cover_the_kernels(tmp_path, monkeypatch):
    for name, text in (("a.py", "x = 1"), ("b.py", "y = 2")):
        (tmp_path / name).write_text(text)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(fingerprint.importlib.util, "find_spec", lambda name: spec)
    fingerprint.sources.cache_clear()
    before = fingerprint.sources()
    (tmp_path / "b.py").write_text("y = 3")
    fingerprint.sources.cache_clear()
    try:
        assert fingerprint.sources() != before
    finally:
        fingerprint.sources.cache_clear()


def test_passes_pickle():
    for graph_pass in (hooks.PostGradPass(Config(kv_split=4)), hooks.JointPass(Config())):
        again = pickle.loads(pickle.dumps(graph_pass))
        assert again.config == graph_pass.config and again.uuid() == graph_pass.uuid()


def test_backend_and_hook_together_rewrite_once(stand_in):  # noqa: F811
    with fusion_pass.enabled():
        assert torch.compile(function, backend="fusion_pass")(X).tolist() == [6.0, 10.0]
    assert [len(report.fused) for report in fusion_pass.reports()] == [1]


def test_hook_fails_open(monkeypatch):
    def failing(gm, config, before_change=None):
        raise RuntimeError("broken pass")

    monkeypatch.setattr(sys.modules["fusion_pass.rewrite"], "run_on_graph", failing)
    with fusion_pass.enabled():
        assert compile_and_run() == [0.0, 10.0]
    assert "broken pass" in fusion_pass.reports()[0].notes[0]


def test_unreadable_report_is_said():
    counters["inductor"][fusion_pass.store._PREFIX + "AAAA"] += 1
    report, = fusion_pass.reports()
    assert "cannot be read" in report.notes[0] and not report
