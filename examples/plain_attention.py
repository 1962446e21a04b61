"""The output path of a DeepSeek-V4 attention layer, written from scratch in plain PyTorch (nothing of fusion_pass).

    python -m fusion_pass explain examples/plain_attention.py:example
    python -m fusion_pass explain examples/plain_attention.py:separate_values

One latent per token serves as key and value, a learned sink joins the softmax, the last 64 channels of every head are
rotated back by the query's own position, and the heads of a group are projected together. Sizes are small except for
the head (512 channels, 64 of them rotary), so that this runs anywhere.
"""

import torch
from torch import Tensor, nn

HEAD_DIM, ROPE_DIM = 512, 64


def rotate_back(o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Inverse RoPE on interleaved pairs of the last channels. o: [B, S, H, 512]; cos, sin: [S, 32]."""
    plain, rotary = o.split((HEAD_DIM - ROPE_DIM, ROPE_DIM), -1)
    even, odd = rotary.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((plain, turned.to(o.dtype)), -1)


class OutputPath(nn.Module):
    """Attention with sink, inverse RoPE and the grouped projection of one layer."""

    def __init__(self, heads: int = 8, groups: int = 2, rank: int = 128) -> None:
        super().__init__()
        self.groups = groups
        self.sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = nn.Parameter(torch.randn(groups, rank, heads // groups * HEAD_DIM) * 0.02)

    def forward(self, q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """q: [B, S, H, 512]; kv: [B, S, 512]; cos, sin: [S, 32] -> [B, S, groups * rank]."""
        batch, tokens, heads, _ = q.shape
        scores = torch.einsum("bshd,bnd->bhsn", q, kv) * HEAD_DIM**-0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        sink = self.sink.to(scores.dtype)[None, :, None, None].expand(batch, heads, tokens, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1, dtype=torch.float32)[..., :-1].to(q.dtype)
        o = torch.einsum("bhsn,bnd->bshd", weights, self.values(kv))
        return self.project(rotate_back(o, cos, sin))

    def values(self, kv: Tensor) -> Tensor:
        """The value rows: DeepSeek-V4 takes the key rows themselves."""
        return kv

    def project(self, o: Tensor) -> Tensor:
        """The heads of a group together: [B, S, H, 512] -> [B, S, groups * rank]."""
        o = o.reshape(*o.shape[:2], self.groups, -1)
        return torch.einsum("bsgk,grk->bsgr", o, self.wo_a).flatten(-2)


class SeparateValues(OutputPath):
    """Not DeepSeek-V4: values are not the keys, so there is no attention op for it; the rest is fused."""

    def values(self, kv: Tensor) -> Tensor:
        """Other rows than the keys."""
        return kv.flip(1)


class KeepsRotated(OutputPath):
    """Hands out the rotated output too: somebody else reads what the fusion would never write."""

    def project(self, o: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The projection and its input."""
        return super().project(o), o


def example(kind: type[OutputPath] = OutputPath):
    """The layer in bf16 and example inputs (1 sequence of 16 tokens), for ``explain``."""
    torch.manual_seed(0)
    model = kind().to(torch.bfloat16).eval()
    angles = torch.arange(16)[:, None] * 10000.0 ** -torch.linspace(0, 1, ROPE_DIM // 2)
    q = torch.randn(1, 16, 8, HEAD_DIM, dtype=torch.bfloat16)
    kv = torch.randn(1, 16, HEAD_DIM, dtype=torch.bfloat16)
    return model, (q, kv, angles.cos(), angles.sin())


def separate_values():
    """A near miss of the attention; inverse RoPE and projection are fused."""
    return example(SeparateValues)


def keeps_rotated():
    """A near miss of the whole chain."""
    return example(KeepsRotated)


if __name__ == "__main__":
    import fusion_pass

    layer, inputs = example()
    with torch.no_grad():
        compiled = torch.compile(layer, backend="fusion_pass", options={"inner": "aot_eager"})
        difference = (compiled(*inputs).float() - layer(*inputs).float()).abs().max()
    print(fusion_pass.reports()[-1])
    print(f"largest difference to eager: {difference:.1e}")
