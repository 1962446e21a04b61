"""Bad input to compiled programs: a clear error, or the right result. (The ops' own checks: tests/kernels.)"""

import sys
from pathlib import Path

import pytest
import torch

import fusion_pass
from fusion_pass import Config

sys.path.insert(0, str(Path(__file__).parent / "graphs"))
from chains import aot, chain, inputs, quantised_chain, raw  # noqa: E402

OPTIONS = {"inner": "aot_eager", "strict": True}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(fn):
    return torch.compile(fn, backend="fusion_pass", fullgraph=True, options=OPTIONS)


def reports_since(count):
    return fusion_pass.reports()[count:]


def close(a, b):
    return a.shape == b.shape and ((a - b).float().norm() / b.float().norm().clamp_min(1e-9)) < 2e-2


@pytest.mark.parametrize("fn", [chain, quantised_chain])
def test_no_tokens(fn):
    args = inputs(tokens=0)
    out = compiled(fn)(*args)
    assert out.shape == fn(*args).shape and out.numel() == 0


@pytest.mark.parametrize("fn", [chain, quantised_chain])
def test_no_tokens_after_some(fn):
    """A graph that holds for any number of tokens holds for none, or is compiled again."""
    run = compiled(fn)
    for tokens in (5, 3, 0, 1):
        args = inputs(tokens=tokens)
        out = run(*args)
        assert out.shape == fn(*args).shape and (tokens == 0 or close(out, fn(*args)))


def test_shapes_that_do_not_fit_fail_as_in_eager():
    q, kv, mask, sink, cos, sin, weight = inputs()
    with pytest.raises(RuntimeError):
        chain(q, kv[..., :64], mask, sink, cos, sin, weight)
    with pytest.raises(RuntimeError):
        compiled(chain)(q, kv[..., :64], mask, sink, cos, sin, weight)


def test_a_rope_table_that_does_not_cover_the_positions():
    q, kv, mask, sink, cos, sin, weight = inputs()
    with pytest.raises(RuntimeError):
        compiled(chain)(q, kv, mask, sink, cos[:, :3], sin[:, :3], weight)


def test_positions_beyond_a_table_fail_as_in_eager():
    def fn(q, kv, mask, sink, cos, sin, weight, positions):
        return chain(q, kv, mask, sink, cos[0][positions][None], sin[0][positions][None], weight)

    args = inputs()
    good, bad = torch.arange(5).flip(0), torch.arange(5) + 3
    run = compiled(fn)
    before = len(fusion_pass.reports())
    assert close(run(*args, good), fn(*args, good))
    assert [len(r.fused) for r in reports_since(before)] == [1]
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        fn(*args, bad)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        run(*args, bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_supported_dtypes(dtype):
    args = inputs(dtype=dtype)
    before = len(fusion_pass.reports())
    assert close(compiled(chain)(*args), chain(*args))
    assert [len(r.fused) for r in reports_since(before)] == [1]


def test_float64_is_left_alone():
    args = tuple(a.double() for a in inputs())

    def fn(*args):
        double = torch.Tensor.float
        torch.Tensor.float = torch.Tensor.double
        try:
            return chain(*args)
        finally:
            torch.Tensor.float = double

    gm = raw(fn, args)
    before = gm.code
    report = fusion_pass.rewrite(gm, Config(strict=True))
    assert not report.fused and gm.code == before
    assert any("float64" in found.gate for found in report.gated), str(report)


def test_integer_inputs_fail_as_in_eager():
    args = list(inputs())
    args[6] = args[6].to(torch.int32)
    with pytest.raises(RuntimeError):
        compiled(lambda *a: torch.bmm(chain(*a[:6], a[6].bfloat16()).flatten(0, 1), a[6]))(*args)


def test_another_device_fails_as_in_eager():
    args = list(inputs())
    args[1] = args[1].to("meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        compiled(chain)(*args)


def test_a_sink_that_is_too_short():
    args = list(inputs())
    args[3] = args[3][:3]
    with pytest.raises(RuntimeError):
        compiled(chain)(*args)


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_in_their_rows(fill):
    args = inputs(batch=2)
    args[0][1, 2] = fill
    out, wanted = compiled(chain)(*args), chain(*args)
    assert torch.equal(out.isfinite(), wanted.isfinite())


def test_a_row_that_attends_to_nothing_gives_zeros_through_the_sink():
    args = list(inputs())
    args[2] = args[2].clone()
    args[2][:, :, 1] = float("-inf")
    out, wanted = compiled(chain)(*args), chain(*args)
    assert close(out, wanted) and out[0, 1].abs().max() == 0


def test_graphs_without_metadata_are_left_alone():
    gm = aot(chain, inputs())
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    before = gm.code
    report = fusion_pass.rewrite(gm, Config())
    assert not report.fused and gm.code == before


@pytest.mark.parametrize("value", [None, 3, torch.nn.Linear(2, 2), lambda x: x])
def test_rewrite_of_something_else(value):
    with pytest.raises(TypeError, match="GraphModule"):
        fusion_pass.rewrite(value)
