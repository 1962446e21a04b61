"""One small call of every op, and of every kernel that could run it here, checked against the float64 reference.

The shapes are small, the dimensions real: head_dim 512 with 64 rotated channels, 8 heads per group, quantisation blocks
of 128.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusion_pass.kernels import ops
from fusion_pass.kernels.ops import dispatch

TOKENS, HEADS, DIM, KEYS, GROUPS, HALF = 6, 16, 512, 40, 2, 32

# bf16 keeps 8 bits, E4M3 4: a relative error of the whole result above these is a fault, not rounding.
TOLERANCE = {"": 2e-2, "quant": 6e-2}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """kernel: what ran (``"reference"`` or a kernel's name). error: relative to float64. ok: whether that is
    rounding. others: the errors of the kernels that would run if the first one refused; ``ok`` is about them as well.
    """

    kernel: str
    why: str
    error: float
    ok: bool
    others: dict[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        others = "".join(f"; {kernel} {error:.1e}" for kernel, error in self.others.items())
        return f"{'ok' if self.ok else 'FAILED'}, {self.kernel}{why}, relative error {self.error:.1e}{others}"


def check_ops(device: str) -> Iterator[tuple[str, Outcome]]:
    """Name and outcome of every op, one at a time. Exceptions of an op end up in its outcome."""
    for name, (arguments, result) in _calls().items():
        op = getattr(torch.ops.fusion_pass, name)
        try:
            exact = result(op(*_cast(arguments, torch.float64, "cpu")))
            args = _cast(arguments, torch.bfloat16, device)
            kernel, why = _kernel(name, args)
            got = {kernel: op(*args)} | dict(_run_others(name, args, kernel))
            errors = {one: _distance(result(value).cpu(), exact) for one, value in got.items()}
            limit = TOLERANCE["quant" if name.endswith("quant") else ""]
            ok = all(error < limit for error in errors.values())
            yield name, Outcome(kernel, why, errors.pop(kernel), ok, errors)
        except Exception as failure:
            yield name, Outcome("none", f"{type(failure).__name__}: {failure}", float("nan"), False)


def _run_others(name: str, args: tuple[Any, ...], taken: str) -> Iterator[tuple[str, Any]]:
    """Name and result of the kernels that could run the op on ``args`` besides the one that is taken."""
    spec = ops.SPECS[name]
    args = spec.complete(args, {})
    for launcher in dispatch.applicable(name, args):
        if launcher.name != taken:
            outs = spec.empty(*args)
            dispatch.launch(launcher, outs, args)
            yield launcher.name, outs[0] if len(outs) == 1 else outs


def _distance(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm()) if got.shape == exact.shape else float("inf")


def _calls() -> dict[str, tuple[tuple[Any, ...], Callable[[Any], Tensor]]]:
    """Arguments (float64, on the CPU) and how to read the result as one float64 tensor."""
    random = _Random()
    q, kv = random(1, TOKENS, HEADS, DIM), random(1, KEYS, DIM)
    angle = random(TOKENS, HALF) * 3
    cos, sin, sink, scale = angle.cos(), angle.sin(), random(HEADS), DIM**-0.5
    indices = torch.randint(-1, KEYS, (TOKENS, 24), generator=random.generator, dtype=torch.int32)
    dense = (q, kv, None, sink)
    gathered = (q[0], kv[0], indices, sink)
    rope, dense_rope = (cos, sin), (cos[None], sin[None])
    quant = (GROUPS, 128, "fp32", 1e-12, False)
    partials, lse = torch.ops.fusion_pass.attention_partials(q[0], kv[0], indices, scale, 3)
    merge = (partials, lse, None, sink)
    codes, scales = torch.ops.fusion_pass.inverse_rope_quant(q[0], cos, sin, *quant)
    weight = random(GROUPS, 128, HEADS * DIM // GROUPS).to(torch.float8_e4m3fn)
    pages = _pages(random, KEYS)
    paged = (q[0], pages, indices, sink)
    weight_scales = random(GROUPS, 1, HEADS * DIM // GROUPS // 128).abs().float()
    return {
        "attention": ((*dense, scale, True), _plain),
        "attention_rope": ((*dense, *dense_rope, scale, GROUPS, True), _plain),
        "attention_rope_quant": ((*dense, *dense_rope, scale, *quant, True), _dequantized),
        "attention_gathered": ((*gathered, scale), _plain),
        "attention_gathered_rope": ((*gathered, *rope, scale, GROUPS), _plain),
        "attention_gathered_rope_quant": ((*gathered, *rope, scale, *quant), _dequantized),
        "attention_paged_fp8": ((*paged, scale, KEYS), _plain),
        "attention_paged_fp8_rope": ((*paged, *rope, scale, GROUPS, KEYS), _plain),
        "attention_paged_fp8_rope_quant": ((*paged, *rope, scale, GROUPS, KEYS, *quant[1:]), _dequantized),
        "attention_partials": ((q[0], kv[0], indices, scale, 3), _weighted),
        "merge_partials": (merge, lambda result: _plain(result[0])),
        "merge_partials_rope": ((*merge, *rope, GROUPS), _plain),
        "merge_partials_rope_quant": ((*merge, *rope, *quant), _dequantized),
        "inverse_rope": ((q[0], *rope, GROUPS), _plain),
        "inverse_rope_quant": ((q[0], *rope, *quant), _dequantized),
        "fp8_bgemm": ((codes, scales, weight, weight_scales), _plain),
    }


def _pages(random: _Random, rows: int) -> Tensor:
    """A cache of one page [1, bytes]: 448 codes and 64 bf16 values per row, then 8 exponent bytes per row (layout:
    ``fusion_pass.kernels.reference.paged``)."""
    codes = (random(rows, 448) * 40).to(torch.float8_e4m3fn).view(torch.uint8)
    rotated = random(rows, 64).bfloat16().view(torch.uint8)
    exponents = torch.randint(120, 126, (rows * 8,), generator=random.generator, dtype=torch.uint8)
    return torch.cat([torch.cat([codes, rotated], 1).flatten(), exponents])[None]


def _plain(result: Tensor) -> Tensor:
    return result.double()


def _dequantized(result: tuple[Tensor, Tensor]) -> Tensor:
    codes, scales = result
    groups, tokens, width = codes.shape
    blocks = codes.double().reshape(groups, tokens, -1, 128)
    return (blocks * scales.double()[:, :, :tokens].transpose(1, 2).unsqueeze(-1)).reshape(codes.shape)


def _weighted(result: tuple[Tensor, Tensor]) -> Tensor:
    partials, lse = result
    return (partials.double() * torch.softmax(lse.double(), 0).nan_to_num().unsqueeze(-1)).sum(0)


def _kernel(name: str, args: tuple[Any, ...]) -> tuple[str, str]:
    launcher, reasons = ops.explain(name, ops.SPECS[name].complete(args, {}))
    return (launcher.name if launcher else "reference"), "; ".join(reasons)


def _cast(arguments: tuple[Any, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    # Statistics, sinks and tables stay in float32, as models keep them; codes and their scales are what they are.
    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype == torch.float64 and dtype != torch.float64:
            value = value.to(dtype if value.shape[-1] == DIM else torch.float32)
        return value.to(device)

    return tuple(one(value) for value in arguments)


class _Random:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        # Values that bf16 represents: the two runs differ by rounding inside the op alone.
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).bfloat16().double()
