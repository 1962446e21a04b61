"""A kernel of one's own that no tracer sees through, made known to the pass.

The rotation here stands for a hand-written CUDA or Triton kernel: it leaves PyTorch (for NumPy). ``register_pattern``
compares it with the reference of its role on random inputs, so a wrong one is refused at once, with the first element
that differs.

    python examples/registered_pattern.py
"""

import numpy as np
import torch

import fusion_pass

HEADS, GROUPS, DIM, HALF = 8, 2, 512, 32


@fusion_pass.register_pattern("inverse_rope")
def my_rotation(o: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """o: [T, H, 512]; cos, sin: [T, 32]; the last 64 channels are rotated back, in interleaved pairs."""
    x = o.float().numpy().copy()
    c, s = cos.float().numpy()[:, None], sin.float().numpy()[:, None]
    even, odd = x[..., -64::2].copy(), x[..., -63::2].copy()
    x[..., -64::2], x[..., -63::2] = even * c + odd * s, odd * c - even * s
    return torch.from_numpy(np.ascontiguousarray(x)).to(o.dtype)


def layer(q, kv, sink, cos, sin, weight):
    """q: [T, H, 512]; kv: [N, 512]; weight: [G, R, 4 * 512] -> [T, G, R]."""
    scores = torch.einsum("thd,nd->thn", q, kv) * DIM**-0.5
    scores = torch.cat((scores, sink[None, :, None].expand(q.shape[0], -1, -1)), -1)
    o = torch.einsum("thn,nd->thd", scores.softmax(-1)[..., :-1], kv)
    x = my_rotation(o, cos, sin).view(q.shape[0], GROUPS, -1)
    return torch.einsum("tgk,grk->tgr", x, weight)


def main() -> fusion_pass.Report:
    """Compile the layer, print and return the report."""
    gen = torch.Generator().manual_seed(0)
    angles = torch.randn(5, HALF, generator=gen)
    args = (torch.randn(5, HEADS, DIM, generator=gen), torch.randn(12, DIM, generator=gen),
            torch.randn(HEADS, generator=gen), angles.cos(), angles.sin(),
            torch.randn(GROUPS, 64, HEADS // GROUPS * DIM, generator=gen) * 0.02)
    with torch.no_grad():
        found = torch.compile(layer, backend="fusion_pass", options={"inner": "aot_eager"})(*args)
        print(f"largest difference to eager: {(found - layer(*args)).abs().max():.1e}")
    report = fusion_pass.reports()[-1]
    print(report)
    return report


if __name__ == "__main__":
    main()
