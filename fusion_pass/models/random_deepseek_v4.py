"""Small and large DeepSeek-V4 models with random weights, from transformers' own classes.

For demonstrations, tests and benchmarks where no checkpoint is at hand. Every kind of attention layer is in them
(sliding window, CSA, HCA), with the real head_dim 512, 64 rotated channels and 8 heads per output group.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_FLOAT32_PARTS = ("attn_hc", "ffn_hc", "hc_head", "sinks", "position_bias")
LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
SIZES: dict[str, dict[str, Any]] = {
    # Two output groups of 8 heads; the window, the compression rates and the indexer are scaled to prompts of some 64
    # tokens.
    "tiny": dict(
        vocab_size=512,
        hidden_size=256,
        moe_intermediate_size=128,
        num_attention_heads=16,
        q_lora_rank=128,
        num_experts_per_tok=2,
        n_routed_experts=4,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        sliding_window=16,
        o_groups=2,
        o_lora_rank=128,
        index_n_heads=4,
        index_topk=8,
        max_position_embeddings=4096,
    ),
    # One slice of V4-Flash: its attention as it is, 8 of its 256 experts, a small vocabulary.
    "flash": dict(vocab_size=4096, n_routed_experts=8, max_position_embeddings=65536),
}


def random_deepseek_v4(
    size: str = "tiny",
    *,
    layer_types: Sequence[str] = LAYER_TYPES,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    experts: str = "batched_mm",
    seed: int = 0,
    **overrides: Any,
) -> nn.Module:
    """A ``DeepseekV4ForCausalLM`` in eval mode.

    size: a key of :data:`SIZES`. device: ``"meta"`` gives the shapes without weights. experts: transformers' experts
    implementation; ``"batched_mm"`` and ``"grouped_mm"`` trace into one graph, ``"eager"`` breaks it.
    overrides: fields of ``DeepseekV4Config``.

    Weights are scaled by 1/sqrt(fan in), so that every block changes the residual stream visibly and an error in one
    layer shows in the logits; layers route by token id, as the first three of the real model do, so that rounding
    cannot send a token to another expert. Raises ImportError without transformers >= 5.8, KeyError for an unknown size.
    """
    import transformers

    new_config: Any = transformers.DeepseekV4Config
    new_model: Any = transformers.DeepseekV4ForCausalLM
    settings = {**SIZES[size], **overrides}
    settings.setdefault("mlp_layer_types", ["hash_moe"] * len(layer_types))
    config = new_config(
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        experts_implementation=experts,
        **settings,
    )
    with torch.device(device):
        model: nn.Module = new_model(config).eval()
    if torch.device(device).type == "meta":
        return _cast(model, dtype)          # shapes only
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("sinks"):
                parameter.normal_(0, 1, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                scores = torch.rand(buffer.shape[0], config.n_routed_experts, generator=generator, device=device)
                buffer.copy_(scores.argsort(-1)[:, : buffer.shape[1]])
    return _cast(model, dtype)


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    # Of the parts that transformers wants in float32 these work with any activation dtype; its norms give float32
    # results that the linears after them refuse.
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in _FLOAT32_PARTS):
            parameter.data = parameter.data.to(dtype)
    return model


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """``cache`` by the name that a transformers model's ``forward`` takes it by: ``past_key_values``, or ``cache`` in
    releases that have renamed it (5.24 takes both, and says that 5.40 will not).
    """
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}


def filled_cache(model: Any, input_ids: torch.Tensor) -> Any:
    """transformers' ``DynamicCache`` after a prompt per row of ``input_ids`` [B, S], filled one row at a time.

    Eager attention of transformers keeps [rows, heads, S, keys] probabilities: of one row they fit where those of a
    batch would not. Rows must not be padded.
    """
    import transformers

    caches = []
    with torch.no_grad():
        for row in input_ids:
            caches.append(transformers.DynamicCache(config=model.config))
            model(row[None], use_cache=True, **cache_argument(model, caches[-1]))
    for number, layer in enumerate(caches[0].layers):
        rows = [vars(cache.layers[number]) for cache in caches]
        vars(layer).update({name: _joined([row[name] for row in rows]) for name in rows[0]})
    return caches[0]


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts) if parts[0].dim() else parts[0]
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return parts[0]


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    """All tensors of a transformers cache.

    Hold them for as long as a CUDA graph lives that was captured with this cache: a step puts new tensors into the
    cache and drops those that the graph reads, and freed memory is soon somebody else's.
    """
    leaves = torch.utils._pytree.tree_leaves([vars(layer) for layer in cache.layers])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
