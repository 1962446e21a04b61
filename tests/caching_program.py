"""What `test_caches.py` runs in processes of their own: a small attention layer, compiled through both ways in.

    caching_program.py save FILE     compile, compile again (from the cache), write torch's cache artifacts to FILE
    caching_program.py load FILE     load them, compile, then compile what must not come from the cache

Prints one JSON object per compilation.
"""

import json
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import fusion_pass
from fusion_pass import Config, fingerprint


def layer(q, kv, sink, cos, sin, weight):
    """q [T, H, 512], kv [N, 512], sink [H], cos and sin [T, 32], weight [2, R, H/2*512] -> [T, 2, R]."""
    scores = torch.einsum("thd,nd->thn", q, kv) * 512**-0.5
    scores = torch.cat((scores, sink[None, :, None].expand(q.shape[0], -1, -1)), -1)
    o = torch.einsum("thn,nd->thd", scores.softmax(-1)[..., :-1], kv)
    even, odd, c, s = o[..., -64::2], o[..., -63::2], cos[:, None], sin[:, None]
    turned = torch.stack((even * c + odd * s, odd * c - even * s), -1).flatten(-2)
    x = torch.cat((o[..., :-64], turned), -1).reshape(q.shape[0], 2, -1)
    return torch.einsum("tgk,grk->tgr", x, weight)


def operands(tokens=5, heads=8, seed=0):
    gen = torch.Generator().manual_seed(seed)
    angles = torch.randn(tokens, 32, generator=gen)
    return (torch.randn(tokens, heads, 512, generator=gen), torch.randn(12, 512, generator=gen),
            torch.randn(heads, generator=gen), angles.cos(), angles.sin(),
            torch.randn(2, 16, heads // 2 * 512, generator=gen))


def by_backend(config=None):
    options = {} if config is None else config.to_dict()
    return torch.compile(layer, backend="fusion_pass", options=options)(*operands())


def by_hook(config=None):
    with fusion_pass.enabled(config):
        return torch.compile(layer)(*operands())


def tell(what, compile_and_run, **arguments):
    torch._dynamo.reset()
    counters.clear()
    fusion_pass.clear_reports()
    with torch.no_grad():
        result = compile_and_run(**arguments)
    report, = fusion_pass.reports()
    values = report.to_dict()
    print(json.dumps({
        "what": what, "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"], "numbers": result.flatten().tolist(),
        "report": [values[name] for name in ("fused", "gated", "near_misses", "nodes")], "notes": values["notes"]}))


def save(file):
    for number in (1, 2):
        tell(f"backend {number}", by_backend)
        tell(f"hook {number}", by_hook)
    artifacts, _ = torch.compiler.save_cache_artifacts()
    file.write_bytes(artifacts)


def load(file):
    assert torch.compiler.load_cache_artifacts(file.read_bytes()) is not None
    tell("backend 1", by_backend)
    tell("hook 1", by_hook)
    # Two configurations in one process, one after the other and back.
    tell("backend other", by_backend, config=Config(disable_rules=("inverse_rope",)))
    tell("hook other", by_hook, config=Config(kv_split=2))
    tell("backend back", by_backend)
    tell("hook back", by_hook)
    # Another kernel source, another torch.
    changes = (("sources", lambda: "changed", by_hook), ("_versions", lambda: ("torch 99",), by_backend))
    for name, changed, way in changes:
        original = getattr(fingerprint, name)
        setattr(fingerprint, name, changed)
        tell(name, way)
        setattr(fingerprint, name, original)


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
