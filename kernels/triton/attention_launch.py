# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""Host side of the portable attention kernel: chooses tile and splits, prepares operands, launches.

Works on any device Triton compiles for, and on CPU tensors under the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from ..launching import at
from ..modes import current
from ..tuning import attention as tuning
from .attention import LOG2E, attention_kernel
from .epilogue import quant_mode
from .interpreter import device_of, e4m3_is_native
from .mask_lists import rows_per_pass, visible_key_lists
from .rope_quant import scale_pointer

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Rope:
    """Inverse RoPE (and quantisation) after attention: tables [B or 1, S, half], heads regrouped into ``groups``;
    ``quant`` is a QUANT constant of the epilogue, 0 = rows in q's dtype."""

    cos: Tensor
    sin: Tensor
    groups: int
    quant: int = 0
    block: int = 128
    floor: float = 1e-12


def rope_quant(cos, sin, groups, block, scale_rule, floor, pack_scales) -> Rope:
    """The epilogue of the ``*_rope_quant`` ops."""
    return Rope(cos, sin, groups, quant_mode(scale_rule, pack_scales), block, floor)


@dataclass(frozen=True)
class Keys:
    """Where a launch finds its keys. ``kv`` [B or 1, N, D].

    Without ``indices``: all rows, cut by ``causal`` and ``window``. With ``indices`` [R, K]: row i of the list serves
    the launch's token i modulo R; ``lengths`` [R] cuts the columns; ``bias`` [B or 1, S, N] is added by row. The
    ``extra`` pool has one list row per token.
    """

    kv: Tensor
    indices: Tensor | None = None
    lengths: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    window: int = 0
    extra_kv: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_lengths: Tensor | None = None

    @property
    def columns(self) -> int:
        return self.kv.shape[1] if self.indices is None else self.indices.shape[1]

    @property
    def extra_columns(self) -> int:
        return 0 if self.extra_indices is None else self.extra_indices.shape[1]


def refuses(q: Tensor, *tables: Tensor | None, quant_block: int | None = None) -> str | None:
    """Why the kernel cannot run this q (and rope tables and sink), or None."""
    for tensor in (q, *tables):
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"{str(tensor.dtype).removeprefix('torch.')} (the kernel computes in fp32)"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim {q.shape[-1]} is not one of {HEAD_DIMS}"
    if quant_block is not None and quant_block & (quant_block - 1):
        return f"quantisation block {quant_block} is not a power of two"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "compute capability below 8.0"
    return None


def _rows(kv: Tensor) -> Tensor:
    """kv with unit channel stride."""
    return kv if kv.stride(-1) == 1 else kv.contiguous()


def _row_stride(kv: Tensor) -> int:
    return kv.stride(-2) if kv.shape[-2] > 1 else kv.shape[-1]


def _packed(lists: Tensor) -> Tensor:
    return lists if lists.stride(-1) == 1 or lists.shape[-1] <= 1 else lists.contiguous()


def choose(q: Tensor, keys: Keys) -> tuple[tuning.Tile, int]:
    """Tile and number of splits for q [B, S, H, D], from sizes and the device only. Batch-invariant calls are not
    split: the tile does not depend on the number of tokens, the split count would."""
    batch, queries, heads, _ = q.shape
    capability, sm_count = device_of(q)
    tile = tuning.tile(capability, heads, q.element_size())
    if current().batch_invariant:
        return tile, 1
    visible = keys.columns
    if keys.indices is None and keys.window > 0:
        visible = min(visible, keys.window + tile.block_n)
    tiles = triton.cdiv(visible, tile.block_n) + triton.cdiv(keys.extra_columns, tile.block_n)
    return tile, tuning.num_splits(batch * queries, triton.cdiv(heads, tile.block_h), tiles, sm_count)


def launch(
    out: Tensor,
    scales: Tensor | None,
    q: Tensor,
    keys: Keys,
    sink: Tensor | None,
    scale: float,
    rope: Rope | None,
    tile: tuning.Tile,
    splits: int | None = None,
    first_token: int = 0,
    tokens: int | None = None,
) -> None:
    """One launch over ``tokens`` tokens of q [B, S, H, D] from ``first_token`` on.

    ``splits`` None: ``out`` (codes as uint8 if ``rope`` quantises, with ``scales``) is the final result; a number:
    ``out`` and ``scales`` are the partials [P, T, H, D] and their lse [P, T, H].
    """
    batch, queries, heads, dim = q.shape
    total = batch * queries
    if tokens is None:
        tokens = total
    kv, extra = _rows(keys.kv), q if keys.extra_kv is None else _rows(keys.extra_kv)
    indexed = keys.indices is not None
    indices = q if keys.indices is None else _packed(keys.indices)
    extra_indices = q if keys.extra_indices is None else _packed(keys.extra_indices)
    if indexed and keys.extra_indices is not None and indices.dtype != extra_indices.dtype:
        # One loop walks both lists. The wider dtype: narrowing could turn a huge index into a valid one.
        indices, extra_indices = indices.long(), extra_indices.long()
    bias_strides: tuple[int, ...] = (0, 0, 0)
    if keys.bias is not None:
        bias_strides = keys.bias.expand(batch, -1, -1).stride()
    tables: tuple[Tensor | int, ...] = (q, 0, 0, 1, q, 0, 0, 1)
    groups, half, quant, block, floor = 1, 0, 0, 1, 1.0
    if rope is not None and splits is None:
        groups, half = rope.groups, rope.cos.shape[-1]
        quant, block, floor = rope.quant, rope.block, rope.floor
        cos, sin = rope.cos.expand(batch, -1, -1), rope.sin.expand(batch, -1, -1)
        tables = (cos, *cos.stride(), sin, *sin.stride())
    at(attention_kernel, (tokens, triton.cdiv(heads, tile.block_h), splits or 1))(
        q,
        *q.stride()[:3],
        kv,
        0 if kv.shape[0] == 1 else kv.stride(0),
        kv.shape[1],
        indices,
        indices.stride(0) if indexed else 0,
        indices.shape[0] if indexed else 1,
        q if keys.lengths is None else keys.lengths.contiguous(),
        keys.columns,
        extra,
        extra.shape[0] if keys.extra_kv is not None else 0,
        extra_indices,
        extra_indices.stride(0) if keys.extra_indices is not None else 0,
        q if keys.extra_lengths is None else keys.extra_lengths.contiguous(),
        keys.extra_columns,
        q if keys.bias is None else keys.bias,
        *bias_strides,
        q if sink is None else sink.contiguous(),
        out,
        out if scales is None else scales,
        *tables,
        first_token,
        total,
        queries,
        kv.shape[1] - queries,
        keys.window,
        scale * LOG2E.value,
        floor,
        H=heads,
        D=dim,
        KV_STRIDE=_row_stride(kv),
        EXTRA_STRIDE=_row_stride(extra) if keys.extra_kv is not None else dim,
        HPG=heads // groups,
        HALF=half,
        BLOCK=block,
        QUANT=quant,
        NATIVE=e4m3_is_native(q.device),
        BLOCK_H=tile.block_h,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        SPLIT=splits is not None,
        INDEXED=indexed,
        HAS_LENGTHS=keys.lengths is not None,
        EXTRA=keys.extra_kv is not None,
        HAS_EXTRA_LENGTHS=keys.extra_lengths is not None,
        CAUSAL=keys.causal and not indexed,
        WINDOW=keys.window > 0 and not indexed,
        BIAS=keys.bias is not None,
        HAS_SINK=sink is not None and splits is None,
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.stages,
    )


def masked_passes(q: Tensor, keys: Keys, mask: Tensor, has_sink: bool):
    """Yield (first token, tokens, Keys) of launches that together cover all tokens under a dense mask.

    The index lists of long prefills are made in passes that share one workspace budget; a mask without batch dimension
    is listed once for all sequences of a pass.
    """
    batch, queries = q.shape[:2]
    count = keys.columns
    bias = None if mask.dtype == torch.bool else mask
    per_pass = rows_per_pass(count)
    if mask.shape[0] == 1 and queries <= per_pass:
        passes = [(0, queries, 0, batch * queries)]
    else:
        passes = []
        for b in range(batch if queries > per_pass or mask.shape[0] > 1 else 1):
            listed = 0 if mask.shape[0] == 1 else b * queries
            for start in range(0, queries, per_pass):
                rows = min(per_pass, queries - start)
                passes.append((listed + start, rows, b * queries + start, rows))
        if mask.shape[0] > 1 and batch * queries <= per_pass:
            passes = [(0, batch * queries, 0, batch * queries)]
    for first_row, rows, first_token, tokens in passes:
        indices = torch.empty((rows, count), dtype=torch.int32, device=mask.device)
        counts = torch.empty((rows,), dtype=torch.int32, device=mask.device)
        visible_key_lists(
            mask,
            first_row,
            rows,
            causal=keys.causal,
            window=keys.window,
            index=indices,
            length=counts,
            minimum_rows=not has_sink,
        )
        yield first_token, tokens, replace(keys, indices=indices, lengths=counts, bias=bias, causal=False, window=0)


def attend(
    outs: tuple[Tensor, ...],
    q: Tensor,
    keys: Keys,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float,
    rope: Rope | None = None,
    tile: tuning.Tile | None = None,
    splits: int | None = None,
) -> None:
    """Attention of q [B, S, H, D] over ``keys`` (and ``mask``) with its epilogue into ``outs``.

    ``outs``: (rows,) or (codes, scales). ``tile`` and ``splits`` override the tables; with more than one split the
    partials go through the merge kernel, which then runs the epilogue.
    """
    if q.stride(-1) != 1:
        q = q.contiguous()
    chosen_tile, chosen_splits = choose(q, keys)
    tile, splits = tile or chosen_tile, splits or chosen_splits
    if mask is not None and mask.is_floating_point() and sink is None:
        # A row of nothing but the dtype's minimum has logits so low that their lse no longer tells how many keys it
        # sums: partials of such rows cannot be weighted against each other. With a sink such rows are zero.
        splits = 1
    quantised = rope is not None and rope.quant != 0
    out = outs[0].view(torch.uint8) if quantised else outs[0]
    scales = scale_pointer(outs[1], rope.quant) if rope is not None and quantised else None
    if splits == 1:
        if mask is None:
            launch(out, scales, q, keys, sink, scale, rope, tile)
            return
        for first_token, tokens, listed in masked_passes(q, keys, mask, sink is not None):
            launch(out, scales, q, listed, sink, scale, rope, tile, None, first_token, tokens)
        return
    batch, queries, heads, dim = q.shape
    partials = torch.empty((splits, batch * queries, heads, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((splits, batch * queries, heads), dtype=torch.float32, device=q.device)
    partial_results(partials, lse, q, keys, mask, sink is not None, scale, tile)
    merge(outs, partials, lse, sink, rope, batch)


def attend_chunk(
    outs: tuple[Tensor, ...],
    q: Tensor,
    keys: Keys,
    sink: Tensor | None,
    scale: float,
    rope: Rope | None,
    first_token: int,
    tokens: int,
) -> None:
    """Like :func:`attend` for tokens first_token .. first_token + tokens - 1 of q [1, T, H, D], whose lists ``keys``
    holds. Splits the keys only when the chunk is all of q."""
    if tokens == q.shape[1]:
        attend(outs, q, keys, None, sink, scale, rope)
        return
    if q.stride(-1) != 1:
        q = q.contiguous()
    quantised = rope is not None and rope.quant != 0
    out = outs[0].view(torch.uint8) if quantised else outs[0]
    scales = scale_pointer(outs[1], rope.quant) if rope is not None and quantised else None
    launch(out, scales, q, keys, sink, scale, rope, choose(q, keys)[0], None, first_token, tokens)


def partial_results(
    partials: Tensor,
    lse: Tensor,
    q: Tensor,
    keys: Keys,
    mask: Tensor | None,
    has_sink: bool,
    scale: float,
    tile: tuning.Tile | None = None,
) -> None:
    """Normalised partials [P, T, H, D] and natural-log lse [P, T, H] of P splits, written for every split."""
    if q.stride(-1) != 1:
        q = q.contiguous()
    tile = tile or choose(q, keys)[0]
    splits = partials.shape[0]
    if mask is None:
        launch(partials, lse, q, keys, None, scale, None, tile, splits)
        return
    for first_token, tokens, listed in masked_passes(q, keys, mask, has_sink):
        launch(partials, lse, q, listed, None, scale, None, tile, splits, first_token, tokens)


def merge(outs, partials: Tensor, lse: Tensor, sink: Tensor | None, rope: Rope | None, batch: int) -> None:
    """Merge the partials of all splits, and run the epilogue there."""
    from .merge import Epilogue, decide, merge_into

    tokens = partials.shape[1]
    if rope is None:
        out = outs[0].view(tokens, *partials.shape[2:])
        merge_into(out, None, None, partials, lse, None, sink, 1.0, decide(partials, None))
        return
    cos, sin = (table.expand(batch, -1, -1).flatten(0, 1) for table in (rope.cos, rope.sin))
    epilogue = Epilogue(cos, sin, rope.groups, rope.quant, rope.block, rope.floor)
    out, scales = (outs[0].view(torch.uint8), outs[1]) if rope.quant else (outs[0], None)
    merge_into(out, scales, None, partials, lse, None, sink, 1.0, decide(partials, None), epilogue)
