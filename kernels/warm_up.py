# SPDX-License-Identifier: Apache-2.0
"""Calls that make Triton compile everything a model's chain can need, before the first request.

Triton compiles a kernel at its first launch with new compile-time parameters. Here these are chosen from head counts,
types and tables whose rows are *ranges* of token counts, so a bounded number of kernels serves any number of tokens;
what is bounded can be compiled ahead. :func:`calls` yields op calls on uninitialised tensors that between them reach
every choice: every number of tokens up to twice the GPU's multiprocessors (beyond which no keys are split), the edges
of the tables above that, and, where the number of keys grows from call to call, every number of splits that some number
of keys gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KV_FORMS = ("dense", "gathered", "paged_fp8", "partials", "opaque")
MASKS = ("none", "bool", "float")
ROW_BYTES = 584  # of a paged FP8 cache
TILE = 64  # keys: no kernel splits finer
NO_KEY = -1
LAST_EDGE = 4096  # tokens at which the last row of a table begins, at most

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Chain:
    """What a model's layers compute, as far as the choice of kernels depends on it.

    heads, groups: of this process (after tensor parallelism). head_dim, rope_dim: channels. rank: rows R of the grouped
    projection. dtype: of queries, keys and results; table_dtype: of cos and sin. sink: whether there are sink logits.
    kv: forms of the keys, of ``KV_FORMS`` (``opaque``: the attention of another library).
    quant: scale rule of the quantisation ("fp32", "ue8m0") or None; with one, the FP8 product is warmed up as well.
    block, weight_block, pack_scales, weight_scales: as in the ops. max_tokens: most tokens of a call.
    Dense keys: masks (of ``MASKS``), causal and window (with mask "none"), max_keys: most keys of a call.
    Gathered and paged keys: capacities, the columns of both index lists per kind of layer (0 = no second list);
    lengths: whether calls pass lengths; index_dtype; page_size; extra_page_sizes: those of the second list's caches
    (empty: page_size).
    Partials: partials, the numbers of them that occur; partial_dtype.
    """

    heads: int
    groups: int
    head_dim: int = 512
    rope_dim: int = 64
    rank: int = 1024
    dtype: torch.dtype = torch.bfloat16
    table_dtype: torch.dtype = torch.float32
    sink: bool = True
    kv: tuple[str, ...] = ("dense",)
    quant: str | None = None
    block: int = 128
    weight_block: int = 128
    pack_scales: bool = False
    weight_scales: torch.dtype = torch.float32
    max_tokens: int = 4096
    masks: tuple[str, ...] = ("none", "float")
    causal: bool = True
    window: int = 128
    max_keys: int = 8192
    capacities: tuple[tuple[int, int], ...] = ((128, 0), (128, 1024))
    lengths: tuple[bool, ...] = (False, True)
    index_dtype: torch.dtype = torch.int32
    page_size: int = 64
    extra_page_sizes: tuple[int, ...] = ()
    partials: tuple[int, ...] = (2,)
    partial_dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        """K of the grouped product."""
        return self.heads // self.groups * self.head_dim

    @property
    def suffix(self) -> str:
        """Ending of the names of this chain's ops."""
        return "_rope" if self.quant is None else "_rope_quant"

    @property
    def quantisation(self) -> tuple[Any, ...]:
        """Quantisation arguments of this chain's ops."""
        return () if self.quant is None else (self.block, self.quant, 1e-12, self.pack_scales)


def token_counts(max_tokens: int, sm_count: int) -> list[int]:
    """Every count up to twice the multiprocessors, then 64 apart up to 1,024, 2,048 and 4,096, each with the next (rows
    of the tables end at such counts), as far as ``max_tokens`` goes. Above ``LAST_EDGE`` nothing depends on the
    count."""
    edges = {*range(64, 1025, 64), 2048, LAST_EDGE}
    found = set(range(1, 2 * sm_count + 1)) | edges | {edge + 1 for edge in edges}
    return sorted(count for count in found if count <= max_tokens)


def key_counts(tokens: int, max_keys: int, sm_count: int) -> list[int]:
    """Numbers of keys that give ``tokens`` tokens every number of splits: one more tile each, up to where every
    multiprocessor has one (two tiles each, as kernels may split by pairs); and ``max_keys``, an odd count and 1 (rows
    of a mask of such widths are aligned otherwise)."""
    tiles = range(1, 2 * (sm_count // tokens) + 3)
    return sorted({min(TILE * count, max_keys) for count in tiles} | {max_keys, (max_keys - 1) | 1, 1})


class _Operands:
    """Uninitialised operands. Index lists hold no key, so that no row is ever read."""

    def __init__(self, chain: Chain, device: torch.device):
        self.chain, self.device = chain, device
        self.sink = self.empty(chain.heads, dtype=torch.float32) if chain.sink else None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.chain.dtype, device=self.device)

    def q(self, *lead: int) -> Tensor:
        return self.empty(*lead, self.chain.heads, self.chain.head_dim)

    def lists(self, tokens: int, columns: int) -> Tensor:
        return torch.full((tokens, columns), NO_KEY, dtype=self.chain.index_dtype, device=self.device)

    def tables(self, *lead: int) -> tuple[Tensor, Tensor]:
        shape = (*lead, self.chain.rope_dim // 2)
        return self.empty(*shape, dtype=self.chain.table_dtype), self.empty(*shape, dtype=self.chain.table_dtype)

    def rope(self, *lead: int) -> tuple[Any, ...]:
        return (*self.tables(*lead), self.chain.head_dim**-0.5, self.chain.groups)


def _dense(make: _Operands, tokens: int, keys: int) -> Iterator[Call]:
    chain = make.chain
    keys = max(keys, tokens)
    q, kv = make.q(1, tokens), make.empty(1, keys, chain.head_dim)
    for kind in chain.masks:
        mask, visible = None, {}
        if kind == "none":
            visible = {"causal": chain.causal, "window": chain.window}
        elif kind == "bool":
            mask = torch.zeros(1, tokens, keys, dtype=torch.bool, device=make.device)
        else:
            mask = torch.full((1, tokens, keys), float("-inf"), dtype=chain.dtype, device=make.device)
        yield f"attention{chain.suffix}", (q, kv, mask, make.sink, *make.rope(1, tokens), *chain.quantisation), visible


def _listed(make: _Operands, tokens: int, capacity: tuple[int, int], paged: bool) -> Iterator[Call]:
    chain = make.chain
    names = ("extra_pages", "attention_paged_fp8") if paged else ("extra_kv", "attention_gathered")
    pool = make.empty(1, chain.head_dim)
    page: tuple[int, ...] = ()
    if paged:
        pool = make.empty(1, chain.page_size, 1, ROW_BYTES, dtype=torch.uint8)
        page = (chain.page_size,)
    args = (make.q(tokens), pool, make.lists(tokens, capacity[0]), make.sink, *make.rope(tokens), *page)
    for with_lengths in chain.lengths:
        length = torch.zeros(tokens, dtype=torch.int32, device=make.device) if with_lengths else None
        more: dict[str, Any] = {"lengths": length}
        name = f"{names[1]}{chain.suffix}"
        if not capacity[1]:
            yield name, (*args, *chain.quantisation), more
            continue
        more |= {names[0]: pool, "extra_indices": make.lists(tokens, capacity[1]), "extra_lengths": length}
        if not paged:
            yield name, (*args, *chain.quantisation), more
            continue
        for size in chain.extra_page_sizes or (chain.page_size,):  # compiled in by the Hopper kernel
            extra = make.empty(1, size, 1, ROW_BYTES, dtype=torch.uint8)
            yield name, (*args, *chain.quantisation), more | {names[0]: extra, "extra_page_size": size}


def _merge(make: _Operands, count: int, tokens: int) -> Call:
    chain = make.chain
    partials = make.empty(count, tokens, chain.heads, chain.head_dim, dtype=chain.partial_dtype)
    lse = torch.full(partials.shape[:3], float("-inf"), device=make.device)
    more: dict[str, Any] = {} if chain.quant else {"out_dtype": chain.dtype}
    args = (partials, lse, None, make.sink, *make.tables(tokens), chain.groups, *chain.quantisation)
    return f"merge_partials{chain.suffix}", args, more


def _product(make: _Operands, tokens: int, weight: Tensor, factors: Tensor) -> Call:
    chain = make.chain
    codes = make.empty(chain.groups, tokens, chain.width, dtype=torch.float8_e4m3fn)
    rows, kind = chain.width // chain.block, torch.float32
    if chain.pack_scales:
        rows, kind = rows // 4, torch.int32
    scales = make.empty(chain.groups, rows, -(-tokens // 4) * 4, dtype=kind)
    return "fp8_bgemm", (codes, scales, weight, factors, chain.block, chain.weight_block, chain.dtype), {}


def calls(chain: Chain, device: torch.device, sm_count: int) -> Iterator[Call]:
    """(op, arguments, keyword arguments) of every call; tensors live on ``device``."""
    make = _Operands(chain, device)
    counts = token_counts(chain.max_tokens, sm_count)
    for tokens in counts:
        if "dense" in chain.kv:
            for keys in key_counts(tokens, chain.max_keys, sm_count) if tokens <= sm_count else (1,):
                yield from _dense(make, tokens, keys)
        for form in ("gathered", "paged_fp8"):
            if form in chain.kv:
                for capacity in chain.capacities:
                    yield from _listed(make, tokens, capacity, form == "paged_fp8")
        if "partials" in chain.kv:
            for count in chain.partials:
                yield _merge(make, count, tokens)
        if "opaque" in chain.kv:
            args = (make.q(tokens), *make.tables(tokens), chain.groups, *chain.quantisation)
            yield f"inverse{chain.suffix}", args, {}
    if chain.quant is not None:
        weight = make.empty(chain.groups, chain.rank, chain.width, dtype=torch.float8_e4m3fn)
        blocks = (-(-chain.rank // chain.weight_block), chain.width // chain.weight_block)
        factors = make.empty(chain.groups, *blocks, dtype=chain.weight_scales)
        for tokens in counts:
            yield _product(make, tokens, weight, factors)
