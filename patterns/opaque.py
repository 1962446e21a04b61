# SPDX-License-Identifier: Apache-2.0
"""Declared opaque ops: library and engine ops that are roles of the chain, and what each computes in plain torch.

The pass writes a declared op out before it looks for chains, so that it is recognised by value like any other code; an
op that ends up in no fused chain stays exactly as it was. What is written here is therefore a claim about somebody
else's op, taken from its source, and each row says which. An op that is only known to hide a role (``expand`` None) is
listed so that reports can name it; the roles behind it are fused all the same.

An ``expand`` takes the op's arguments in the order of its schema, those with a default by name. It returns the op's
results followed by the new values of the arguments that the op changes in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import opaque_engines as engines
from . import opaque_libraries as libraries
from .written_out import NotExpanded

Shapes = list[tuple[int, ...] | None]
Requires = Callable[[Shapes, dict[int, torch.Tensor]], "str | None"]


@dataclass(frozen=True)
class OpaqueOp:
    """One declared op.

    name: qualified name (``namespace::op``); ``*::op`` is any namespace, with exactly the arguments ``arguments``.
    versions: releases the row was written for. roles: what it computes, in dataflow order. source: where that is
    documented. expand: see the module. known: positions of arguments whose *values* matter and must follow from the
    graph; ``requires(shapes, values)`` gets the shapes of all arguments and those values, and returns a reason against
    writing the op out, or None. label: name that the user registered it under. expand_fp8: what it computes with
    ``Config(o_proj="fp8")``, where that differs: other numbers, on request.
    """

    name: str
    versions: str
    roles: tuple[str, ...]
    source: str
    expand: Callable[..., tuple[Any, ...]] | None
    arguments: tuple[str, ...] = ()
    known: tuple[int, ...] = ()
    requires: Requires | None = None
    label: str = ""
    expand_fp8: Callable[..., tuple[Any, ...]] | None = None

    def under(self, o_proj: str) -> OpaqueOp:
        """The row as ``Config(o_proj=...)`` wants it."""
        if o_proj != "fp8" or self.expand_fp8 is None:
            return self
        return replace(self, expand=self.expand_fp8, roles=("fp8_quant", "bgemm"))

    @property
    def rules(self) -> frozenset[str]:
        """Names under which ``Config(disable_rules=...)`` switches it off (roles apart)."""
        return frozenset((self.name, self.name.partition("::")[2], self.label)) - {""}


_FINEGRAINED = "transformers FP8GroupedLinear, kernels-community/finegrained-fp8"
_VLLM_ROPE = "vllm/models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py"

ROWS: tuple[OpaqueOp, ...] = (
    # transformers: quantisation inside the product; equal groups are a matter of the values of `offsets`.
    *(OpaqueOp(name, "transformers 5.8 to 5.24", ("fp8_quant", "bgemm"), _FINEGRAINED, libraries.matmul_grouped,
               known=(3, 4), requires=libraries.equal_groups)
      for name in ("finegrained_fp8::matmul_grouped", "finegrained_fp8::w8a8_block_fp8_matmul_grouped")),
    OpaqueOp("flashinfer::merge_state", "0.2 to 0.7", ("kv_merge",), "flashinfer/cascade.py", libraries.merge_state),
    OpaqueOp("flashinfer::merge_states", "0.2 to 0.7", ("kv_merge",), "flashinfer/cascade.py", libraries.merge_states),
    OpaqueOp("*::sparse_attn", "official inference code", ("fmha",), "inference/kernel.py, sparse_attn",
             libraries.sparse_attn, arguments=("q", "kv", "attn_sink", "topk_idxs", "softmax_scale")),
    OpaqueOp("vllm::deepseek_v4_attention", "0.20 to 0.22", ("fmha",), "vllm/models/deepseek_v4 (attention layer)",
             None),
    OpaqueOp("vllm::fused_inv_rope_fp8_quant_kernel", "0.22 to 0.33", ("inverse_rope", "fp8_quant"), _VLLM_ROPE,
             engines.vllm_fused_inv_rope_fp8_quant),
    OpaqueOp("vllm::deepseek_v4_fp8_einsum", "0.20 to 0.33", ("bgemm",),
             "vllm/models/deepseek_v4 (DeepGEMM fp8_einsum)", engines.vllm_fp8_einsum),
    OpaqueOp("trtllm::fused_inv_rope_fp8_quant_vllm_port", "1.3", ("inverse_rope", "fp8_quant"),
             "TensorRT-LLM pull requests 13938, 14547", engines.trtllm_fused_inv_rope_fp8_quant),
    OpaqueOp("trtllm::cute_dsl_fp8_bmm_blackwell", "1.3", ("bgemm",),
             "tensorrt_llm/_torch/custom_ops (CuTe DSL)", engines.trtllm_fp8_bmm),
    OpaqueOp("trtllm::mla_rope_inplace", "1.3", ("inverse_rope",), "TensorRT-LLM mlaRopeInplace (thop)",
             engines.trtllm_mla_rope_inplace),
    OpaqueOp("auto_deploy::torch_deepseek_v4_sparse_attention", "TensorRT-LLM AutoDeploy", ("fmha",),
             "tensorrt_llm/_torch/auto_deploy (sparse attention source op)", libraries.sparse_attn),
    OpaqueOp("auto_deploy::torch_deepseek_v4_sparse_attention_v2", "TensorRT-LLM AutoDeploy", ("fmha",),
             "tensorrt_llm/_torch/auto_deploy (sparse attention with compressor operands)",
             libraries.sparse_attn_with_compressor),
    OpaqueOp("auto_deploy::deepseek_v4_fused_rope_concat", "TensorRT-LLM AutoDeploy", ("inverse_rope",),
             "tensorrt_llm/_torch/auto_deploy/custom_ops/deepseek_v4_rope.py", libraries.fused_rope_concat),
    OpaqueOp("auto_deploy::view", "TensorRT-LLM AutoDeploy", ("bgemm",),
             "tensorrt_llm/_torch/auto_deploy/custom_ops (sharding-aware ops)", libraries.shaped),
    OpaqueOp("auto_deploy::torch_grouped_linear", "TensorRT-LLM AutoDeploy", ("bgemm",),
             "tensorrt_llm/_torch/auto_deploy (modeling_deepseek_v4.py)", libraries.grouped_linear),
    OpaqueOp("sglang::fp8_wo_a_group_major_quant_ue8m0", "0.5", ("fp8_quant",),
             "sglang kernels, dsv4 fp8_wo_a_group_major_quant", engines.sglang_wo_a_quant),
    OpaqueOp("fusion_pass::grouped_linear_with_fp8", "this package", ("bgemm",), "fusion_pass/models/two_forms.py",
             libraries.grouped_linear_as_written, expand_fp8=libraries.grouped_linear_in_fp8),
)

_BY_NAME = {row.name: row for row in ROWS if not row.name.startswith("*::")}
_BY_SUFFIX = {row.name[3:]: row for row in ROWS if row.name.startswith("*::")}
_REGISTERED: dict[str, OpaqueOp] = {}
_OURS = frozenset(("aten", "prims", "prim", "fusion_pass", "inductor_prims", "inductor", "rngprims"))


def declared(target: Any) -> OpaqueOp | None:
    """The row of an operator (an ``OpOverload``), or None."""
    if not isinstance(target, torch._ops.OpOverload) or (
            target.namespace in _OURS and target._schema.name not in _BY_NAME):
        return None
    name = target._schema.name
    row = _REGISTERED.get(name) or _BY_NAME.get(name)
    if row is None:
        row = _BY_SUFFIX.get(name.partition("::")[2])
        if row is not None and row.arguments != tuple(a.name for a in target._schema.arguments):
            return None
    return row


def add(row: OpaqueOp) -> None:
    """Declare one more op (``register_pattern`` does). Raises ValueError when the name is taken."""
    if row.name in _REGISTERED or row.name in _BY_NAME:
        raise ValueError(f"{row.name} is declared already: unregister it first")
    _REGISTERED[row.name] = row


def remove(name: str) -> None:
    """Take back what :func:`add` declared. Raises KeyError for another name."""
    del _REGISTERED[name]


def rows() -> list[OpaqueOp]:
    """All declared ops, those of the user last."""
    return [*ROWS, *_REGISTERED.values()]


__all__ = ["NotExpanded", "OpaqueOp", "ROWS", "add", "declared", "remove", "rows"]
