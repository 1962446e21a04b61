"""The numeric engine against running the operators: one test per rule, and random programs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import evaluate, program, result, same, trace

from fusion_pass.elements.numeric import Numeric, Unevaluated, random_leaf
from fusion_pass.elements.sizes import Sizes

F = torch.nn.functional


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = randn(2, 3, 4)
SQUARE = randn(4, 4, seed=1)
MASK = X > 0
INDEX = torch.tensor([2, 0, 1, 1])

RULES = {
    "view": lambda x: x.view(6, 4), "reshape": lambda x: x.transpose(0, 1).reshape(-1), "permute": lambda x: x.permute(
        2, 0, 1), "slice": lambda x: x[:, 1:, ::2], "negative slice": lambda x: x[..., -3:-1],
    "select": lambda x: x[:, -1], "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "cat": lambda x: torch.cat([x, x[:, :1]], 1), "stack": lambda x: torch.stack([x, -x], -1),
    "pad": lambda x: F.pad(x, (1, 0, 0, 2), value=7.0), "negative pad": lambda x: F.pad(x, (-1, 0)),
    "slice scatter": lambda x: torch.slice_scatter(x, x[:, :1] * 2, 1, 1, 2),
    "select scatter": lambda x: torch.select_scatter(x, x[:, 0], 1, 2), "flip": lambda x: x.flip(0, 2),
    "repeat": lambda x: x.repeat(2, 1, 3), "repeat_interleave": lambda x: x.repeat_interleave(3, 2),
    "tril": lambda x: x.tril(1), "triu": lambda x: x.triu(-1), "diagonal": lambda x: x.diagonal(0, 1, 2),
    "split": lambda x: x.split([1, 3], 2)[1], "chunk": lambda x: x.chunk(2, 2)[1], "unbind": lambda x: x.unbind(1)[2],
    "unfold": lambda x: x.unfold(2, 2, 1), "as_strided": lambda x: x.as_strided((3, 2), (4, 1), 2),
    "block_diag": lambda x: torch.block_diag(x[0], x[1]), "write into a slice": lambda x: x.clone().index_put(
        (torch.tensor([1]),), x[:1] * 3),
    "sum": lambda x: x.sum((0, 2)), "sum all": lambda x: x.sum(), "mean": lambda x: x.mean(1, True),
    "amax": lambda x: x.amax((1, 2)), "amin": lambda x: x.amin(0), "max": lambda x: x.max(1).values,
    "max index": lambda x: x.max(1).indices, "min": lambda x: x.min(2).values, "max all": lambda x: x.max(),
    "any": lambda x: (x > 1).any(1), "all": lambda x: (x > -1).all(2), "any over dims": lambda x: (x > 1).any((0, 1)),
    "logsumexp": lambda x: x.logsumexp(2), "prod": lambda x: x.prod(1), "cumsum": lambda x: x.cumsum(1),
    "softmax": lambda x: x.softmax(1), "log_softmax": lambda x: x.log_softmax(-1),
    "index": lambda x: x[:, torch.tensor([2, 0])],
    "index of two": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 0])],
    "negative index": lambda x: x[:, torch.tensor([-1, 0])],
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 1])), "gather": lambda x: x.gather(
        2, INDEX.expand(2, 3, 4)), "embedding": lambda x: F.embedding(INDEX, x.reshape(6, 4)),
    "where": lambda x: torch.where(MASK, x, x * 2), "masked_fill": lambda x: x.masked_fill(MASK, -torch.inf),
    "boolean put": lambda x: torch.where(MASK, torch.zeros((), dtype=x.dtype), x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "arange": lambda x: x + torch.arange(1, 9, 2), "full": lambda x: x + torch.full((4,), 2.0),
    "ones": lambda x: x * torch.ones_like(x) + x.new_zeros(4), "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(2, 3, 2, 2)) * torch.polar(x[:1, :1, :2].abs(), x[:1, :1, 2:]).conj()),
    "mm": lambda x: x[0] @ SQUARE, "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)), "linear": lambda x: F.linear(
        x, SQUARE, SQUARE[0]), "addmm": lambda x: torch.addmm(x[0], x[1], SQUARE, beta=0.5, alpha=2.0),
    "baddbmm": lambda x: torch.baddbmm(x[:, :, :3], x, x.transpose(1, 2), beta=2.0, alpha=0.5),
    "baddbmm without addend": lambda x: torch.baddbmm(x[:, :, :3] * torch.nan, x, x.transpose(1, 2), beta=0.0),
    "einsum": lambda x: torch.einsum("bij,bkj->kbi", x, x), "matmul": lambda x: torch.matmul(x, SQUARE),
    "multiply and sum": lambda x: (x.unsqueeze(2) * SQUARE).sum(-1),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x[:, :, :3], scale=0.3),
    "to int": lambda x: (x * 10).to(torch.int32), "to bool": lambda x: (x * 3).round().to(torch.bool),
    "bits": lambda x: (x.float().round(decimals=1).double() * 0 + 2.0).float().view(torch.int32) >> 23,
    "e4m3": lambda x: (x * 100).to(torch.float8_e4m3fn).float(), "e5m2": lambda x: x.to(torch.float8_e5m2).float(),
    "bits of codes": lambda x: x.to(torch.float8_e4m3fn).view(torch.uint8), "widen bits": lambda x: (x * 9).to(
        torch.int32).to(torch.uint8).view(torch.int32), "pow": lambda x: 2.0 ** x.ceil(),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    gm = trace(RULES[name], X)
    wanted = RULES[name](X)
    assert same(evaluate(gm, (X,)), wanted)
    # Some elements, in any order and repeatedly, are the same elements.
    index = torch.randint(0, wanted.numel(), (7,), generator=torch.Generator().manual_seed(1))
    assert same(evaluate(gm, (X,), index), wanted.reshape(-1)[index])


@settings(max_examples=150, deadline=None)
@given(program(), st.integers(0, 1000))
def test_random_programs_agree_with_running_them(drawn, seed):
    names, run, shape = drawn
    x = randn(*shape, seed=seed)
    assert same(evaluate(trace(run, x), (x,)), run(x), 1e-8), names


def test_unknown_inputs_are_an_error_not_a_guess():
    gm = trace(lambda x: x + 1, X)
    with pytest.raises(Unevaluated, match="graph input"):
        Numeric(Sizes(), {}).values(result(gm), torch.arange(3))


def test_random_operators_have_no_value():
    gm = trace(lambda x: x + torch.rand_like(x), X)
    with pytest.raises(Unevaluated):
        evaluate(gm, (X,))


def test_random_leaves():
    index = torch.arange(10000)
    values = random_leaf(3)(index)
    assert torch.equal(values, random_leaf(3)(index)), "reproducible"
    assert not torch.equal(values, random_leaf(4)(index))
    assert len(torch.unique(values)) > 9990
    assert values.abs().max() < 1 and values.mean().abs() < 0.05
    for seed in (0, 1 << 40, (1 << 62) + 5):
        assert torch.isfinite(random_leaf(seed)(index)).all()
