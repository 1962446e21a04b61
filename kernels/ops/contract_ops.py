# SPDX-License-Identifier: Apache-2.0
"""Three ops for engines that run attention as an in-place op outside their captured graphs.

An engine that captures a model piece by piece allocates the attention's result in one piece, fills it in an op that no
piece contains, and projects it in the next piece. These ops keep that contract with the fused result in it:

    create_outputs      allocates the plain output, or the pair of codes and scales, as the gate decides
    attention_into      fills what was allocated; says with a flag which form it expects
    project_outputs     takes either form

Shapes: T tokens, H heads of D channels in G groups, K = H/G*D, R rows of the projection. The number of scale columns M
is an argument wherever it matters: it is decided once, by who allocates, and never derived again from a token count
that padding may have changed. The contract is that of TensorRT-LLM's create_mla_outputs and mla_custom_op_inplace.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checks
from .registry import NAMESPACE

ops = torch.ops.fusion_pass


@dataclass(frozen=True)
class OutputsDecision:
    """Which form is allocated, and why."""

    fused: bool
    reason: str


def outputs_gate(q: Tensor, weight: Tensor, groups: int, block: int = 128) -> OutputsDecision:
    """Fused or plain? q: [T, H, D]. weight: the projection's weight [G, R, K].

    Decided from what does not change between calls (dtypes, head counts, the kill switch), so that a captured graph and
    its eager neighbour agree.
    """
    _, heads, dim = q.shape
    if os.environ.get("FUSION_PASS_DISABLE", "").strip().lower() not in ("", "0", "false", "off", "no"):
        return OutputsDecision(False, "FUSION_PASS_DISABLE is set")
    if weight.dtype != checks.E4M3:
        return OutputsDecision(False, f"the projection's weight is {weight.dtype}, not float8_e4m3fn")
    if q.dtype not in (torch.bfloat16, torch.float16):
        return OutputsDecision(False, f"attention in {q.dtype}")
    if groups < 1 or heads % groups:
        return OutputsDecision(False, f"{heads} heads do not split into {groups} groups")
    if dim % block:
        return OutputsDecision(False, f"head_dim {dim} is no multiple of the quantisation block {block}")
    return OutputsDecision(True, f"FP8 weight, {heads} heads in {groups} groups")


def create_outputs(
    q: Tensor,
    weight: Tensor,
    groups: int,
    scale_columns: int,
    block: int = 128,
    pack_scales: bool = False,
    fused: bool | None = None,
) -> list[Tensor]:
    """[output [T, H, D]] or [output [0, H, D], codes [G, T, K], scales [G, K/block, M]], uninitialised.

    With ``pack_scales`` the scales are int32 [G, K/(4*block), M].
    M = ``scale_columns``, a multiple of 4 and at least T.
    fused None: the gate decides.
    """
    tokens, heads, dim = q.shape
    if fused is None:
        fused = outputs_gate(q, weight, groups, block).fused
    if not fused:
        return [q.new_empty(q.shape)]
    _check_columns("create_outputs", tokens, scale_columns)
    width = heads // groups * dim
    kind, rows = (torch.int32, width // (4 * block)) if pack_scales else (torch.float32, width // block)
    return [
        q.new_empty((0, heads, dim)),
        q.new_empty((groups, tokens, width), dtype=checks.E4M3),
        q.new_empty((groups, rows, scale_columns), dtype=kind),
    ]


def _check_columns(op: str, tokens: int, columns: int) -> None:
    if checks.known(columns) and (columns % 4 or (checks.known(tokens) and columns < tokens)):
        checks.fail(op, f"scale_columns a multiple of 4 and at least {tokens}", str(columns))


def _check_form(
    q: Tensor, output: Tensor, codes: Tensor | None, scales: Tensor | None, groups: int, scale_columns: int, fused: bool
) -> None:
    op = "attention_into"
    given = codes is not None or scales is not None
    if fused != given or (codes is None) != (scales is None):
        form = "codes and scales" if fused else "neither codes nor scales"
        got = ", ".join(name for name, t in (("codes", codes), ("scales", scales)) if t is not None) or "neither"
        checks.fail(op, f"{form} with fused={fused}", got, "The flag and the allocated outputs must agree.")
    tokens, heads, dim = q.shape
    checks.check_shape(op, "output", output, (0 if fused else tokens, heads, dim), "[0 if fused else T, H, D]")
    if codes is None or scales is None:
        return
    _check_columns(op, tokens, scale_columns)
    checks.check_dtype(op, "codes", codes, (checks.E4M3,))
    checks.check_shape(op, "codes", codes, (groups, tokens, heads // groups * dim), "[G, T, K]")
    checks.check_dtype(op, "scales", scales, (torch.float32, torch.int32))
    checks.check_shape(op, "scales", scales, (groups, None, scale_columns), "[G, blocks, scale_columns]")


def attention_into(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    output: Tensor,
    codes: Tensor | None,
    scales: Tensor | None,
    scale: float,
    groups: int,
    scale_columns: int,
    fused: bool,
    block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    lengths: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Gathered attention (operands and mode as in ``attention_gathered``) into the outputs of :func:`create_outputs`.

    fused False: the plain result, not rotated, into ``output``. True: rotated and quantised into ``codes`` and
    ``scales``, padding columns zero. Raises ValueError when the flag, the buffers and ``scale_columns`` disagree.
    """
    _check_form(q, output, codes, scales, groups, scale_columns, fused)
    more: dict[str, Tensor | bool | None] = {
        "lengths": lengths,
        "extra_kv": extra_kv,
        "extra_indices": extra_indices,
        "extra_lengths": extra_lengths,
        "batch_invariant": batch_invariant,
    }
    if codes is None or scales is None:
        ops.attention_gathered.out(q, kv, indices, sink, scale, **more, out=output)
        return
    arguments = (q, kv, indices, sink, cos, sin, scale, groups, block, scale_rule, floor, scales.dtype == torch.int32)
    columns = (q.shape[0] + 3) // 4 * 4
    if scale_columns == columns:
        ops.attention_gathered_rope_quant.out(*arguments, **more, codes=codes, scales=scales)
        return
    part = scales.new_empty((scales.shape[0], scales.shape[1], columns))
    ops.attention_gathered_rope_quant.out(*arguments, **more, codes=codes, scales=part)
    scales[..., :columns] = part
    scales[..., columns:] = 0


def project_outputs(
    outputs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    weight_scales: Tensor | None,
    groups: int,
    block: int = 128,
    weight_block: int = 128,
    scale_rule: str = "fp32",
    floor: float = 1e-12,
    batch_invariant: bool = False,
) -> Tensor:
    """[T, G, R] of either form of outputs, in the dtype of the attention.

    Plain form: rotates (and quantises, for an E4M3 weight) first. weight [G, R, K] E4M3 with ``weight_scales`` as in
    ``fp8_bgemm``, or of the output's own dtype without scales. Raises ValueError for a list of another length.
    """
    if len(outputs) not in (1, 3):
        got = f"{len(outputs)} tensors"
        checks.fail("project_outputs", "one plain output, or three outputs of the fused form", got)
    output = outputs[0]
    if len(outputs) == 3:
        codes, scales = outputs[1], outputs[2]
        columns = (codes.shape[1] + 3) // 4 * 4
        if scales.shape[2] != columns:
            scales = scales[..., :columns].contiguous()
    elif weight.dtype == checks.E4M3:
        codes, scales = ops.inverse_rope_quant(output, cos, sin, groups, block, scale_rule, floor, False)
    else:
        grouped = ops.inverse_rope(output, cos, sin, groups)
        return torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1).contiguous()
    arguments = (codes, scales, weight, weight_scales, block, weight_block, output.dtype)
    product: Tensor = ops.fp8_bgemm(*arguments, batch_invariant=batch_invariant)
    return product


def _fake_into(*args: object, **kwargs: object) -> None:
    names = (
        "q",
        "kv",
        "indices",
        "sink",
        "cos",
        "sin",
        "output",
        "codes",
        "scales",
        "scale",
        "groups",
        "scale_columns",
        "fused",
    )
    given: dict[str, Any] = dict(zip(names, args)) | kwargs
    _check_form(*(given[n] for n in ("q", "output", "codes", "scales", "groups", "scale_columns", "fused")))


def _fake_project(
    outputs: Sequence[Tensor], cos: Tensor, sin: Tensor, weight: Tensor, *rest: object, **named: object
) -> Tensor:
    tokens = outputs[1].shape[1] if len(outputs) == 3 else outputs[0].shape[0]
    return outputs[0].new_empty((tokens, weight.shape[0], weight.shape[1]))


def _register() -> None:
    tags = (torch.Tag.pt2_compliant_tag,)
    for name, schema, body, fake in (
        (
            "create_outputs",
            "(Tensor q, Tensor weight, int groups, SymInt scale_columns, int block=128, "
            "bool pack_scales=False, bool? fused=None) -> Tensor[]",
            create_outputs,
            create_outputs,
        ),
        (
            "attention_into",
            "(Tensor q, Tensor kv, Tensor indices, Tensor? sink, Tensor cos, Tensor sin, "
            "Tensor(a!) output, Tensor(b!)? codes, Tensor(c!)? scales, float scale, int groups, SymInt scale_columns, "
            "bool fused, int block=128, str scale_rule='fp32', float floor=1e-12, Tensor? lengths=None, "
            "Tensor? extra_kv=None, Tensor? extra_indices=None, Tensor? extra_lengths=None, "
            "bool batch_invariant=False) -> ()",
            attention_into,
            _fake_into,
        ),
        (
            "project_outputs",
            "(Tensor[] outputs, Tensor cos, Tensor sin, Tensor weight, Tensor? weight_scales, "
            "int groups, int block=128, int weight_block=128, str scale_rule='fp32', float floor=1e-12, "
            "bool batch_invariant=False) -> Tensor",
            project_outputs,
            _fake_project,
        ),
    ):
        if hasattr(getattr(torch.ops, NAMESPACE), name):
            continue
        qualname = f"{NAMESPACE}::{name}"
        torch.library.define(qualname, schema, tags=tags)
        torch.library.impl(qualname, "default", body)
        torch.library.register_fake(qualname, fake)


_register()
