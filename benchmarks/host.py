# SPDX-License-Identifier: Apache-2.0
"""Host time of one call of an op, without CUDA graphs: the ordinary launches, the replay of a launch plan, and the call
that makes the plan; ``torch.bmm`` beside them tells what a call of one kernel costs on this machine.

Calls follow each other without waiting for the GPU. Where its own time is longer than the host's it shows through, so
take few tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fusion_pass.kernels.ops import decisions

from benchmarks import harness, inputs
from benchmarks.inputs import attention_inputs, pools, projection
from benchmarks.shapes import SHAPES, Shape

TOKENS = (1, 8, 32)
CALLS = 40  # between two looks at the clock: fewer than a stream's queue holds
KEYS = 640
ORDINARY, REPLAY, FIRST = "ordinary launches", "replay of a launch plan", "first call of a form"
ONE = "one kernel"


def cases(shape: Shape, tokens: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(name, op, arguments) of a decoding step's calls, ``tokens`` sequences of one token each."""
    ops = torch.ops.fusion_pass
    near, far = pools(2, rows=4096)
    x = attention_inputs(shape, tokens, near, far)
    rope, scale = (x.cos, x.sin), x.scale
    dense = (x.q.unsqueeze(1), torch.randn(tokens, KEYS, shape.head_dim, device=inputs.DEVICE).bfloat16())
    mask = torch.zeros(tokens, 1, KEYS, device=inputs.DEVICE, dtype=torch.bfloat16)
    tables = tuple(table.unsqueeze(1) for table in rope)
    quant = (128, "ue8m0", 1e-10, False)
    lists = (None, x.extra_kv, x.extra_indices)
    yield "dense, masked", ops.attention_rope.default, (*dense, mask, x.sink, *tables, scale, shape.groups)
    gathered = (x.q, x.kv, x.indices, x.sink, *rope, scale, shape.groups, *quant, *lists)
    yield "gathered, quantised", ops.attention_gathered_rope_quant.default, gathered
    codes, scales = ops.attention_gathered_rope_quant(*gathered)
    weight = projection(shape)
    yield "product", ops.fp8_bgemm.default, (codes, scales, weight.weight, weight.scales)
    yield "rotation, quantised", ops.inverse_rope_quant.default, (x.q, *rope, shape.groups, *quant)
    yield "torch.bmm", torch.bmm, (dense[1], dense[1].transpose(1, 2))


def host_us(call: Callable[[], Any], samples: int) -> float:
    """Median over ``samples`` of the host's microseconds per call."""
    found = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


@contextlib.contextmanager
def launching(replays: bool) -> Iterator[None]:
    """Calls replay launch plans or not, whatever ``FUSION_PASS_LAUNCH_PLANS`` says; nothing is remembered before or
    after."""
    before, decisions.REPLAYS = decisions.REPLAYS, replays
    decisions.forget()
    try:
        yield
    finally:
        decisions.REPLAYS = before
        decisions.forget()


def not_replayed() -> str | None:
    """None when a call since the last ``forget`` has made a plan, else what its recording said."""
    known = list(decisions._known.values())
    if any(decision.plan is not None for decision in known):
        return None
    return ", ".join(decision.outcome for decision in known) or "the call is not remembered"


def ways(op: Callable[..., Any], arguments: tuple[Any, ...], samples: int) -> dict[str, float | str]:
    """Microseconds of a call by the way it is launched; a string where that way does not exist."""

    def call() -> None:
        op(*arguments)

    def forgotten() -> None:
        decisions.forget()
        call()

    call()  # compiles
    if op is torch.bmm:
        return {ONE: host_us(call, samples)}
    found: dict[str, float | str] = {}
    with launching(replays=False):
        found[ORDINARY] = host_us(call, samples)
    with launching(replays=True):
        for _ in range(3):
            call()
        found[REPLAY] = not_replayed() or host_us(call, samples)
        found[FIRST] = host_us(forgotten, samples)
    return found


@torch.no_grad()
def run(args: argparse.Namespace) -> list[dict]:
    """Rows: one per (shape, tokens, op, way); ``failed`` instead of a time where a call cannot be replayed."""
    rows = []
    for shape in (SHAPES[name] for name in args.shapes):
        for tokens in args.tokens or TOKENS:
            for name, op, arguments in cases(shape, tokens):
                for way, us in ways(op, arguments, args.replays).items():
                    figure = {"us": None, "failed": us} if isinstance(us, str) else {"us": round(us, 1)}
                    rows.append({"shape": f"{shape.name}: {name}", "T": tokens, "variant": way, **figure})
            harness.free()
    return rows
