# SPDX-License-Identifier: Apache-2.0
"""What the pass costs when a graph is compiled: its own timer against Dynamo + AOTAutograd, without code generation.

transformers' DeepSeek-V4 in the Pro configuration, as fake tensors (no weights, nothing is computed), with 1, 8 and 61
layers; transformers' Llama, where there is nothing to find; and a graph of 10,000 nodes without an anchor. Runs on
the CPU. ``--layers`` chooses the layer counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

NEEDS_GPU = False
LAYERS = (1, 8, 61)
TOKENS = 2048
# V4-Pro's attention as it is; few small experts, as the experts only add nodes that the pass walks past.
PRO = dict(
    vocab_size=1024, hidden_size=7168, moe_intermediate_size=256, num_attention_heads=128, q_lora_rank=1536,
    num_experts_per_tok=2, n_routed_experts=4, o_groups=16, o_lora_rank=1024, index_topk=1024,
    max_position_embeddings=65536,
)


def _layer_types(count: int) -> list[str]:
    """Pro's order: HCA first, then CSA and HCA in turn (sliding layers are in Flash only; one stands in for them)."""
    if count == 1:
        return ["heavily_compressed_attention"]
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    return ["sliding_attention"] + [kinds[i % 2] for i in range(count - 1)]


def _captured(build: Callable[[], torch.nn.Module]) -> dict:
    """Dynamo and AOTAutograd on fake tensors; the pass runs on the inference graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fusion_pass import guarded
    from fusion_pass.config import Config

    reports = []

    def compiler(gm: torch.fx.GraphModule, _inputs: object) -> Callable:
        reports.append(guarded.run(gm, Config(strict=True), level="aot"))
        return gm.forward

    torch._dynamo.reset()
    model = build().eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model.to_empty(device="cpu")
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        call = torch.compile(model, backend=aot_autograd(fw_compiler=compiler, inference_compiler=compiler))
        start = time.perf_counter()
        call(ids, use_cache=False)
        total = time.perf_counter() - start
    seconds = sum(r.seconds for r in reports)
    rest = total - seconds
    return {"nodes": sum(r.nodes for r in reports), "graphs": len(reports), "fused": sum(len(r.fused) for r in reports),
            "visits": sum(r.visits for r in reports), "pass_s": round(seconds, 4), "dynamo_aot_s": round(rest, 3),
            "share": round(seconds / rest, 5)}


def _no_anchor(nodes: int) -> dict:
    """A chain of matrix products, norms and activations: contractions, but nothing that joins channels."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fusion_pass.config import Config
    from fusion_pass.rewrite import run_on_graph

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(nodes // 10):
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = x + torch.nn.functional.silu(y @ w).transpose(0, 1).transpose(0, 1)
        return x

    gm = make_fx(block, tracing_mode="fake")(torch.empty(16, 64), torch.empty(64, 64))
    samples = []
    for _ in range(7):          # nothing is changed in such a graph; the fastest run is the one that nothing disturbed
        start = time.perf_counter()
        report = run_on_graph(gm, Config().resolve())
        samples.append(time.perf_counter() - start)
    seconds = min(samples)
    count = len(gm.graph.nodes)
    return {"nodes": count, "graphs": 1, "fused": len(report.fused), "visits": report.visits,
            "pass_s": round(seconds, 4), "ms_per_10k_nodes": round(seconds * 1e7 / count, 2)}


def run(args: argparse.Namespace) -> list[dict]:
    """Rows: model, layers, nodes, chains fused, node visits, seconds of the pass and of Dynamo + AOT, their ratio."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fusion_pass.models import random_deepseek_v4

    def llama() -> torch.nn.Module:
        with torch.device("meta"):
            return LlamaForCausalLM(LlamaConfig(
                vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=4))

    rows = [{"model": "no anchor", "layers": 0, **_no_anchor(10_000)}]
    rows.append({"model": "Llama", "layers": 8, **_captured(llama)})
    for layers in args.layers or LAYERS:
        kinds = _layer_types(layers)
        rows.append({"model": "V4-Pro", "layers": layers, **_captured(
            lambda kinds=kinds: random_deepseek_v4("tiny", layer_types=kinds, device="meta", **PRO))})
        print(rows[-1], flush=True)
    return rows
