"""A DeepSeek-V4 attention layer from scratch, in plain PyTorch, written in three different ways.

All three compute the same: one latent per token is key and value, a sliding window, a learned sink in the softmax,
rotation of the last 64 channels of queries and latents, its inverse on the output, and the projection of the heads in
groups. No name, shape convention or operator is shared with any library; the pass recognises what is computed.

    python examples/from_scratch.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_pass

HIDDEN, HEADS, GROUPS, RANK, DIM, ROPE, WINDOW = 128, 8, 2, 64, 512, 64, 8


class Layer(nn.Module):
    """What the three have in common: weights, queries and latents. x: [B, S, HIDDEN] -> [B, S, HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(HIDDEN, HEADS * DIM, bias=False)
        self.to_kv = nn.Linear(HIDDEN, DIM, bias=False)
        self.sink = nn.Parameter(torch.randn(HEADS))
        self.wo_a = nn.Parameter(torch.randn(GROUPS, RANK, HEADS // GROUPS * DIM) * 0.02)
        self.wo_b = nn.Linear(GROUPS * RANK, HIDDEN, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        """[B, S, HEADS, DIM], every head normalised."""
        return F.rms_norm(self.to_q(x).unflatten(-1, (HEADS, DIM)), (DIM,))


def angles(tokens: int) -> Tensor:
    """[S, 32], the rotation of each pair of channels at each position."""
    return torch.arange(tokens)[:, None] * 10000.0 ** -torch.linspace(0, 1, ROPE // 2)


class Complex(Layer):
    """Rotation by complex numbers, einsum, the sink as one more logit."""

    def rotate(self, x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x[..., -ROPE:].float().unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((x[..., :-ROPE], torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)), -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        turn = torch.polar(torch.ones(tokens, ROPE // 2), angles(tokens))
        q, kv = self.rotate(self.queries(x), turn[:, None]), self.rotate(self.to_kv(x), turn)
        scores = torch.einsum("bshd,bnd->bhsn", q, kv) * DIM**-0.5
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), float("-inf"))
        scores = torch.cat((scores, self.sink[:, None, None].expand(batch, -1, tokens, 1).to(scores.dtype)), -1)
        o = torch.einsum("bhsn,bnd->bshd", scores.softmax(-1)[..., :-1], kv)
        o = self.rotate(o, turn[:, None].conj()).reshape(batch, tokens, GROUPS, -1)
        return self.wo_b(torch.einsum("bsgk,grk->bsgr", o, self.wo_a).flatten(2))


class Strided(Layer):
    """Heads before tokens, rotation on strided slices, the softmax written out, one projection per group in a loop."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.clone()
        even, odd = x[..., -ROPE::2].clone(), x[..., 1 - ROPE::2].clone()
        x[..., -ROPE::2] = even * cos - odd * sin
        x[..., 1 - ROPE::2] = even * sin + odd * cos
        return x

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        cos, sin = angles(tokens).cos(), angles(tokens).sin()
        q = self.rotate(self.queries(x).transpose(1, 2), cos, sin)
        kv = self.rotate(self.to_kv(x), cos, sin)[:, None]
        bias = torch.full((tokens, tokens), float("-inf")).triu(1) + torch.full((tokens, tokens), float("-inf")).tril(
            -WINDOW)
        scores = q @ kv.transpose(-1, -2) / DIM**0.5 + bias
        sink = self.sink.view(1, HEADS, 1, 1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        p = torch.exp(scores - top)
        o = (p @ kv) / (p.sum(-1, keepdim=True) + torch.exp(sink - top))
        o = self.rotate(o, cos, -sin).transpose(1, 2)
        size = HEADS // GROUPS
        parts = [o[:, :, g * size : (g + 1) * size].flatten(2) @ self.wo_a[g].T for g in range(GROUPS)]
        return self.wo_b(torch.cat(parts, -1))


class Gathered(Layer):
    """Flat tokens; every query gathers the rows that it attends to (an index of -1 is none), as sparse attention does;
    rotation by a matrix of pairs."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        plain, pairs = x[..., : DIM - ROPE], x[..., DIM - ROPE :].unflatten(-1, (ROPE // 2, 2))
        even, odd = pairs.unbind(-1)
        return torch.cat((plain, torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)), -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        cos, sin = angles(tokens).cos()[:, None], angles(tokens).sin()[:, None]
        q = self.rotate(self.queries(x), cos, sin)
        kv = self.rotate(self.to_kv(x)[:, :, None], cos, sin)[:, :, 0]
        rows = torch.arange(tokens)[:, None] - torch.arange(WINDOW)             # [S, WINDOW]
        near = kv[:, rows.clamp(min=0)]                                         # [B, S, WINDOW, DIM]
        scores = (q @ near.transpose(-1, -2)) * DIM**-0.5                       # [B, S, HEADS, WINDOW]
        scores = scores.masked_fill((rows < 0)[:, None], float("-inf"))
        total = torch.logsumexp(torch.cat((scores, self.sink.expand(batch, tokens, HEADS)[..., None]), -1), -1)
        o = torch.exp(scores - total[..., None]) @ near
        o = self.rotate(o, cos, -sin).reshape(batch * tokens, GROUPS, -1)
        y = torch.bmm(o.transpose(0, 1), self.wo_a.mT).transpose(0, 1)
        return self.wo_b(y.reshape(batch, tokens, -1))


def main(inner: str = "aot_eager") -> list[fusion_pass.Report]:
    """Compile each, print what was fused and how far it is from eager; the reports."""
    reports = []
    for kind in (Complex, Strided, Gathered):
        torch.manual_seed(0)
        layer, x = kind().eval(), torch.randn(2, 16, HIDDEN)
        with torch.no_grad():
            wanted = layer(x)
            found = torch.compile(layer, backend="fusion_pass", fullgraph=True, options={"inner": inner})(x)
        reports.append(fusion_pass.reports()[-1])
        print(f"{kind.__name__}: largest difference to eager {(found - wanted).abs().max():.1e}\n{reports[-1]}")
    return reports


if __name__ == "__main__":
    main()
