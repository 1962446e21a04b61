"""Whole output paths put together of parts in words of many strangers (``stranger_parts``): each is fused as one chain,
with eager's value. And near misses (``stranger_near_misses``): the part that is none is not taken for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import stranger_near_misses as near_misses
import stranger_parts as parts
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_pass
from fusion_pass import Config, Report

BATCH, TOKENS, KEYS = 2, 5, 12
ROLES = ("fmha", "inverse_rope", "fp8_quant", "bgemm")
PLAIN = (lambda q, kv, visible, sink: q, parts.product_of_complex, None, parts.by_einsum)     # the output is an input
# Every part once; quantisation, and roundings to bf16 and fp16, in some.
PROGRAMS = [
    (attention, rotation, quantisation, projection, dtype) for attention, rotation, quantisation, projection, dtype in
    zip([a for a in parts.ATTENTION if a is not parts.fused_then_gate], itertools.cycle(parts.ROTATION),
        [*parts.QUANTISATION, *[None] * 16], itertools.cycle(parts.PROJECTION),
        itertools.cycle([torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float32]))]


def program(attention: Callable, rotation: Callable, quantisation: Callable | None, projection: Callable,
            dtype: torch.dtype) -> Callable:
    def run(q, kv, visible, sink, cos, sin, weight):
        o = attention(q.float(), kv.float(), visible, sink).to(dtype)
        o = rotation(o.float(), cos, sin).to(dtype)
        if quantisation is not None:
            o = quantisation(o.float().flatten(2)).reshape(o.shape).to(dtype)
        return projection(o.float(), weight.float()).to(dtype)
    return run


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    visible = torch.rand(BATCH, TOKENS, KEYS, generator=g) > 0.3
    visible[..., 0] = True
    angle = normal(TOKENS, parts.ROPE // 2)
    width = parts.HEADS * parts.DIM // parts.GROUPS
    return [normal(BATCH, TOKENS, parts.HEADS, parts.DIM).to(dtype), normal(BATCH, KEYS, parts.DIM).to(dtype), visible,
            normal(parts.HEADS), angle.cos(), angle.sin(),
            (normal(parts.GROUPS, parts.RANK, width) / width ** 0.5).to(dtype)]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def compiled(fn: Callable, dtype: torch.dtype) -> tuple[Report, float]:
    """The report of the compiled function, and how far its value is from eager's."""
    torch._dynamo.reset()
    before = len(fusion_pass.reports())
    with torch.no_grad():
        wanted = fn(*inputs(dtype))
        found = torch.compile(fn, backend="fusion_pass", fullgraph=True,
                              options={"inner": "aot_eager", "strict": True})(*inputs(dtype))
    report, = fusion_pass.reports()[before:]
    return report, distance(found, wanted)


def check(report: Report, error: float, quantisation: Callable | None, dtype: torch.dtype) -> None:
    chain, = report.fused or [None]
    assert chain is not None, report
    assert chain.roles == tuple(r for r in ROLES if quantisation is not None or r != "fp8_quant"), report
    if quantisation is not None:
        assert chain.quant == ("ue8m0" if "power" in quantisation.__name__ else "fp32") and chain.group == 128
    # One code of E4M3 more or less is 6 % of a single value.
    assert error < (2e-5 if quantisation is None and dtype is torch.float32 else 2e-2)


def names(value: object) -> str:
    return getattr(value, "__name__", str(value).removeprefix("torch."))


# Batch and heads come as one axis from this loop over groups: the rotation is fused, the attention in front is not.
JOINED = (parts.kv_repeated, parts.rows_in_another_order, parts.by_tensordot_loop)


@pytest.mark.parametrize("attention, rotation, quantisation, projection, dtype", [
    pytest.param(*p, marks=pytest.mark.xfail(strict=True, reason="batch and heads as one axis"))
    if (p[0], p[1], p[3]) == JOINED else p for p in PROGRAMS], ids=names)
def test_fused(attention, rotation, quantisation, projection, dtype):
    check(*compiled(program(attention, rotation, quantisation, projection, dtype), dtype), quantisation, dtype)


def test_tables_are_taken_as_they_are():
    report, error = compiled(program(PLAIN[0], parts.sines_rolled, *PLAIN[2:], torch.float32), torch.float32)
    assert [chain.roles for chain in report.fused] == [("inverse_rope", "bgemm")] and error < 1e-6


class Called(torch.nn.Module):
    def __init__(self, fn: Callable) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


@pytest.mark.parametrize("attention, rotation, quantisation, projection, dtype", PROGRAMS[::6], ids=names)
def test_exported(attention, rotation, quantisation, projection, dtype):
    fn = program(attention, rotation, quantisation, projection, dtype)
    torch._dynamo.reset()
    with torch.no_grad():
        exported = torch.export.export(Called(fn), tuple(inputs(dtype)), strict=False)
        report = fusion_pass.rewrite(exported, Config(strict=True))
        error = distance(exported.module()(*inputs(dtype)), fn(*inputs(dtype)))
    check(report, error, quantisation, dtype)


@pytest.mark.parametrize("role, place, part", [
    (role, place, part) for place, (role, listed) in enumerate((
        ("fmha", near_misses.ATTENTION), ("inverse_rope", near_misses.ROTATION),
        ("fp8_quant", near_misses.QUANTISATION), ("bgemm", near_misses.PROJECTION))) for part in listed],
    ids=lambda value: getattr(value, "__name__", ""))
def test_near_miss(role, place, part):
    chosen = list(PLAIN)
    chosen[place] = part
    fn, given = program(*chosen, torch.float32), inputs()
    with torch.no_grad():
        traced = make_fx(torch.func.functionalize(fn, remove="mutations"))(*given)
        wanted = traced(*given)
        report = fusion_pass.rewrite(traced, Config(strict=True))
        error = distance(traced(*given), wanted)
    assert not any(role in chain.roles for chain in report.fused), report
    assert error < 1e-6


def test_a_sink_beside_a_subtracted_mask_is_proved():
    """Half the sink is a sink of its own: the value is that of the source, though the mask could hide it."""
    def half(q, kv, visible, sink):
        scores = torch.einsum("bthd,bnd->bhtn", q, kv) * parts.SCALE - 1e30 * (~visible)[:, None]
        return torch.einsum("bhtn,bnd->bthd", parts.with_column(scores, sink * 0.5), kv)

    report, error = compiled(program(half, *PLAIN[1:], torch.float32), torch.float32)
    check(report, error, None, torch.float32)


def test_scores_computed_a_second_time_are_left_alone():
    """Not recognised: a fused attention whose log-sum-exp is computed once more from scores of its own."""
    report, error = compiled(program(parts.fused_then_gate, *PLAIN[1:], torch.float32), torch.float32)
    assert [chain.roles for chain in report.fused] == [("inverse_rope", "bgemm")] and error < 1e-6
    assert report.near_misses[0].role == "fmha", report
