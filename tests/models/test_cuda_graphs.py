"""CUDA graphs of transformers' DeepSeek-V4 on a GPU: Inductor's mode and capture by hand give the same results, in as
many pieces as without the pass."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.8")
pytest.importorskip("triton")

import fusion_pass  # noqa: E402
from fusion_pass.models import (  # noqa: E402
    cache_argument,
    cache_tensors,
    filled_cache,
    random_deepseek_v4,
    replace_grouped_linear,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(
            enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def partitions(monkeypatch):
    """For every graph that Inductor compiles: how many pieces of it become CUDA graphs."""
    from torch._inductor.scheduler import Scheduler

    counts = []
    original = Scheduler.graph_partition

    def counting(self):
        result = original(self)
        counts.append(sum(not signature.skip_cudagraph for signature in result[1]))
        return result

    monkeypatch.setattr(Scheduler, "graph_partition", counting)
    return counts


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def model(request):
    model = random_deepseek_v4("tiny", device="cuda", experts="grouped_mm")
    if request.param == "fp8":
        replace_grouped_linear(model)
    return model


def relative(value, wanted):
    return ((value.double() - wanted.double()).norm() / wanted.double().norm()).item()


def prompt():
    return torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()


def called(call, *args, **kwargs):
    """Logits of the first call of a function in CUDA-graph mode, which runs its code, and of the third, which replays
    it (the second records)."""
    results = []
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        results.append(call(*args, **kwargs).logits.clone())
    return results[0], results[2]


@pytest.mark.parametrize("how", ["mode", "options"])
def test_reduce_overhead(model, partitions, how):
    ids = prompt()
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    counts = {}
    for backend in ("inductor", "fusion_pass"):
        torch._dynamo.reset()
        partitions.clear()
        known = len(fusion_pass.reports())
        arguments = {"mode": "reduce-overhead"}
        if how == "options" and backend == "fusion_pass":
            arguments = {"options": {"mode": "reduce-overhead"}}
        run, replay = called(torch.compile(model, backend=backend, fullgraph=True, **arguments), ids, use_cache=False)
        counts[backend] = list(partitions)
    assert [len(report.fused) for report in fusion_pass.reports()[known:]] == [3]
    assert counts["fusion_pass"] == counts["inductor"] and counts["inductor"], counts
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped
    assert relative(replay, run) < 1e-6, "replaying does what running does"
    assert relative(run, model(ids, use_cache=False).logits) < 0.11, "see TOLERANCE in test_transformers.py"


def test_capture_by_hand(model):
    """A decode step with transformers' own cache, captured and replayed on another token."""
    ids = prompt()
    filled = filled_cache(model, ids)
    compiled = torch.compile(model, backend="fusion_pass", fullgraph=True)

    def step(token):
        return compiled(token, use_cache=True, **cache_argument(model, copy.deepcopy(filled))).logits

    token = ids[:, :1].clone()
    step(token), step(token)
    cache = copy.deepcopy(filled)
    inputs = cache_tensors(cache)       # the graph reads them; the step takes them out of the cache
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = compiled(token, use_cache=True, **cache_argument(model, cache)).logits
    for column in (0, 7):
        token.copy_(ids[:, column:column + 1])
        graph.replay()
        torch.cuda.synchronize()
        assert relative(logits, step(token)) < 1e-6
    del inputs
