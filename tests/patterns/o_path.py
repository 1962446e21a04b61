"""A small DeepSeek-V4 output path for graph tests, and how a test compiles it and looks at the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from fusion_pass.kernels import reference
from torch import Tensor

import fusion_pass

HEAD_DIM, ROPE = 512, 64
NOPE, HALF = HEAD_DIM - ROPE, ROPE // 2


@dataclass
class Path:
    """Operands of one layer: T tokens, H heads in G groups, R rows per group."""

    tokens: int = 5
    heads: int = 8
    groups: int = 2
    rows: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        self.width = self.heads // self.groups * HEAD_DIM
        self.o = torch.randn(self.tokens, self.heads, HEAD_DIM, generator=gen).bfloat16()
        self.hidden = torch.randn(self.tokens, 16, generator=gen)
        self.positions = torch.randint(0, 50, (self.tokens,), generator=gen)
        angles = torch.arange(64)[:, None] * 0.3 ** torch.linspace(0, 6, HALF)
        self.cache = torch.cat((angles.cos(), angles.sin()), -1)
        codes = torch.randn(self.groups, self.rows, self.width, generator=gen).clamp(-4, 4).to(torch.float8_e4m3fn)
        self.weight = codes
        self.weight_scales = torch.rand(self.groups, self.rows // 128, self.width // 128, generator=gen) * 0.01 + 0.001
        self.wo_b = torch.randn(24, self.groups * self.rows, generator=gen).bfloat16() * 0.05

    def rotated(self, o: Tensor) -> Tensor:
        """The inverse rotation, in ordinary torch."""
        tables = self.cache[self.positions]
        return reference.rotate_inverse(o.float(), tables[:, :HALF], tables[:, HALF:]).to(o.dtype)


@dataclass
class Compiled:
    """What a compiled call gave."""

    out: Tensor
    report: fusion_pass.Report
    ops: list[str]


def run(fn: Callable, *args: Tensor, dynamic: bool | None = None, **options: object) -> Compiled:
    """Compile with ``backend="fusion_pass"``, run once, and list the operators of the rewritten graphs."""
    torch._dynamo.reset()
    ops: list[str] = []
    from fusion_pass import backend

    original = backend.run_boxed

    def watching(gm: torch.fx.GraphModule):
        ops.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        ops.extend(f"{n.target}({n.args[0]})" for n in gm.graph.nodes
                   if n.op == "call_function" and "auto_functionalized" in str(n.target))
        return original(gm)

    backend.run_boxed = watching
    try:
        before = len(fusion_pass.reports())
        with torch.no_grad():
            compiled = torch.compile(fn, backend="fusion_pass", fullgraph=True, dynamic=dynamic,
                                     options={"inner": "aot_eager", "strict": True, **options})
            out = compiled(*args)
    finally:
        backend.run_boxed = original
    return Compiled(out, fusion_pass.Report.merge(fusion_pass.reports()[before:]), ops)


def assert_close(found: Tensor, want: Tensor, tolerance: float = 2e-2) -> None:
    """Relative to the largest value: codes on a rounding border may fall to either side."""
    scale = float(want.abs().max())
    error = float((found.double() - want.double()).abs().max())
    assert error <= tolerance * scale, f"error {error} of {scale}"


def roles(compiled: Compiled) -> list[tuple[str, ...]]:
    """Roles of all fused chains."""
    return [chain.roles for chain in compiled.report.fused]
