# SPDX-License-Identifier: Apache-2.0
"""Random arguments for every op: the kernels (interpreter) against the reference.

Shapes, strides, dtypes, indices and lengths out of range, NaN and infinity in rows that are read and in rows that are
not, huge and tiny values, scales and sinks. Inputs lie between guards of NaN and indices that point outside are drawn
on purpose, so that a read of foreign memory shows; outputs lie between guards that must stay as they were.
"""

import math

import pytest
import torch
from fuzzing import cases, tried
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from fusion_pass.kernels import reference  # noqa: E402
from fusion_pass.kernels.ops import SPECS, dispatch  # noqa: E402

if torch.cuda.is_available():
    pytest.skip("for the interpreter", allow_module_level=True)

NEG_INF, NAN, INF = float("-inf"), float("nan"), float("inf")
GUARD = 64
# Of the largest attended value: rounding of the result, and of the weights before the second product.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
FLOATS = list(TOLERANCE)


class Draw:
    """Random tensors of one case."""

    def __init__(self, data):
        self.data = data
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def pick(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def chance(self, of=4):
        return self.data.draw(st.integers(1, of)) == 1

    def number(self, low, high):
        return self.data.draw(st.integers(low, high))

    def laid_out(self, x):
        """``x`` with strides of its own, inside a buffer whose other elements are NaN (or a huge number)."""
        kind = self.pick("plain", "guarded", "spread", "turned")
        if x.dim() == 0 or kind == "plain" or x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8):
            return x
        fill = NAN if x.is_floating_point() else True if x.dtype == torch.bool else torch.iinfo(x.dtype).max
        if kind == "turned" and x.dim() > 2:
            return self.guarded(x.transpose(0, 1), fill).transpose(0, 1)
        if kind == "spread":
            wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), fill, dtype=x.dtype)
            wide[..., ::2] = x
            return wide[..., ::2]
        return self.guarded(x, fill)

    def guarded(self, x, fill):
        flat = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype)
        inside = flat[GUARD : GUARD + x.numel()].view(x.shape)
        inside.copy_(x)
        return inside

    def values(self, *shape, dtype, bad_rows=(), bad=(NAN, INF, NEG_INF)):
        """Rows [.., D]; ``bad_rows`` (flat numbers) hold one of ``bad``."""
        std = self.pick(1.0, 1.0, 1e-6, 30.0, 0.0)
        x = torch.randn(shape, generator=self.generator) * std
        rows = x.view(-1, shape[-1]) if x.numel() else x
        for row in bad_rows:
            rows[row, self.number(0, shape[-1] - 1)] = self.pick(*bad)
        return self.laid_out(x.to(dtype))

    def tables(self, *shape):
        angle = torch.rand(shape, generator=self.generator) * 6.28
        dtype = self.pick(*FLOATS)
        return self.laid_out(angle.cos().to(dtype)), self.laid_out(angle.sin().to(dtype))

    def sink(self, heads):
        kind = self.pick("none", "normal", "normal", "huge", "absent")
        if kind == "none":
            return None
        sink = torch.randn(heads, generator=self.generator)
        sink = {"normal": sink, "huge": sink * 1e4, "absent": torch.full((heads,), NEG_INF)}[kind]
        return self.laid_out(sink.to(self.pick(*FLOATS)))

    def scale(self):
        return self.pick(0.09, 0.09, 1.0, 0.0, -0.3, 1e-20, 40.0)

    def indices(self, tokens, columns, pool):
        """Valid rows, -1, and numbers outside the pool on both sides."""
        dtype = self.pick(torch.int32, torch.int64)
        index = torch.randint(0, max(pool, 1), (tokens, columns), generator=self.generator)
        kind = torch.randint(0, 8, (tokens, columns), generator=self.generator)
        limit = torch.iinfo(dtype).max
        outside = [-1, pool, pool + 3, -7, limit, -limit - 1]
        chosen = torch.randint(0, len(outside), (tokens, columns), generator=self.generator)
        index = torch.where(kind < 2, torch.tensor(outside)[chosen], index if pool else torch.full_like(index, -1))
        return self.laid_out(index.to(dtype))

    def lengths(self, tokens, columns):
        if self.chance(2):
            return None
        low, high = (-3, columns + 5) if self.chance(3) else (0, columns)
        return torch.randint(low, high + 1, (tokens,), generator=self.generator).to(self.pick(torch.int32, torch.int64))

    def bad_rows(self, rows):
        return sorted({self.number(0, rows - 1) for _ in range(2)}) if rows and self.chance(3) else ()

    def quantisation(self, dim):
        block = self.pick(*(b for b in (32, 64, 128) if dim % b == 0))
        rule = self.pick("fp32", "ue8m0")
        return block, rule, self.pick(1e-12, 1e-4, 0.5)

    def packing(self, rule, k, block):
        return rule == "ue8m0" and k % (4 * block) == 0 and self.chance(2)


def dense(draw, rope, quant):
    heads, dim = draw.pick(1, 2, 3, 4), draw.pick(64, 128)
    batch, queries, keys = draw.number(1, 2), draw.number(0, 5), draw.pick(0, 1, 3, 17, 40)
    dtype = draw.pick(*FLOATS)
    kv_batch = draw.pick(1, batch)
    kind = draw.pick("none", "bool", "float", "minimum")
    # A key behind the dtype's minimum may be read (weight 0) or left out: all scores must then be finite.
    bad_q, bad = (), ()
    if kind != "minimum":
        bad_q, bad = draw.bad_rows(batch * queries * heads), draw.bad_rows(kv_batch * keys)
    q = draw.values(batch, queries, heads, dim, dtype=dtype, bad_rows=bad_q)
    kv = draw.values(kv_batch, keys, dim, dtype=dtype, bad_rows=bad, bad=(NAN,))
    mask = None
    if kind != "none":
        shape = (draw.pick(1, batch), queries, keys)
        keep = torch.rand(shape, generator=draw.generator) < draw.pick(0.0, 0.3, 0.8)
        mask = keep
        if kind != "bool":
            mask = torch.randn(shape, generator=draw.generator)
            mask = mask.masked_fill(~keep, NEG_INF if kind == "float" else torch.finfo(torch.float32).min)
            mask_dtype = draw.pick(dtype, torch.float32)
            mask = mask.clamp(min=torch.finfo(mask_dtype).min).masked_fill(mask == NEG_INF, NEG_INF).to(mask_dtype)
        mask = draw.laid_out(mask)
    visible = (draw.chance(2), draw.pick(0, 0, 1, 4, 100))
    args = [q, kv, mask, draw.sink(heads)]
    if not rope:
        return [*args, draw.scale(), *visible]
    groups = draw.pick(*(g for g in (1, 2, 4) if heads % g == 0))
    args += [*draw.tables(draw.pick(1, batch), queries, draw.pick(1, 16, 32)), draw.scale(), groups]
    if quant:
        block, rule, floor = draw.quantisation(dim)
        args += [block, rule, floor, draw.packing(rule, heads // groups * dim, block)]
    return [*args, *visible]


def gathered(draw, rope, quant, paged=False, partial=False):
    heads, dim, tokens = draw.pick(1, 2, 4), 512 if paged else draw.pick(64, 128), draw.number(0, 4)
    dtype = draw.pick(*FLOATS)
    q = draw.values(tokens, heads, dim, dtype=dtype, bad_rows=draw.bad_rows(tokens * heads))

    def pool():
        columns = draw.pick(0, 1, 5, 20)
        if paged:
            count, page = draw.number(1, 3), draw.pick(1, 4)
            return pages(draw, count, page), draw.indices(tokens, columns, count * page), columns, page
        rows = draw.pick(0, 1, 7, 40)
        # Infinity in a key's only channel of weight 0 is NaN or nothing, depending on the order of the arithmetic.
        kv = draw.values(rows, dim, dtype=dtype, bad_rows=draw.bad_rows(rows), bad=(NAN,))
        return kv, draw.indices(tokens, columns, rows), columns, 0

    kv, indices, columns, page = pool()
    sink, rest = (draw.sink(heads), [])
    args = [q, kv, indices] + ([] if partial else [sink])
    groups = draw.pick(*(g for g in (1, 2, 4) if heads % g == 0))
    if rope:
        args += draw.tables(tokens, draw.pick(1, 16, 32))
    args.append(draw.scale())
    if rope:
        args.append(groups)
    if paged:
        args.append(page)
    if partial:
        args.append(draw.pick(1, 2, 5))
    if quant:
        block, rule, floor = draw.quantisation(dim)
        args += [block, rule, floor, draw.packing(rule, heads // groups * dim, block)]
    rest = [draw.lengths(tokens, columns), None, None, None]
    extra_page = 0
    if draw.chance(2):
        extra, extra_indices, extra_columns, extra_page = pool()
        rest[1:] = [extra, extra_indices, draw.lengths(tokens, extra_columns)]
    return args + rest + ([extra_page] if paged else [])


def pages(draw, count, page):
    """A paged FP8 cache; codes and rotated channels may be NaN, exponents reach their ends."""
    data = torch.randint(0, 256, (count, page * 584 + draw.pick(0, 40)), generator=draw.generator).to(torch.uint8)
    if not draw.chance(3):  # ordinary numbers: no NaN codes, exponents near 127
        data[:, : page * 576] &= 0x3F
        data[:, page * 576 : page * 584] = 124
    return data


def rows(draw, quant):
    heads, dim, tokens = draw.pick(1, 2, 3, 4), draw.pick(64, 128, 192, 512), draw.number(0, 6)
    groups = draw.pick(*(g for g in (1, 2, 3, 4) if heads % g == 0))
    o = draw.values(tokens, heads, dim, dtype=draw.pick(*FLOATS), bad_rows=draw.bad_rows(tokens * heads))
    args = [o, *draw.tables(tokens, draw.pick(1, 16, 32)), groups]
    if quant:
        block, rule, floor = draw.quantisation(dim)
        args += [block, rule, floor, draw.packing(rule, heads // groups * dim, block)]
    return args


def merge(draw, rope, quant):
    heads, dim, tokens = draw.pick(1, 2, 4), draw.pick(64, 128, 512), draw.number(0, 4)
    splits, dtype = draw.pick(1, 2, 5, 17), draw.pick(*FLOATS)
    partials = draw.values(splits, tokens, heads, dim, dtype=dtype)
    lse = torch.randn(splits, tokens, heads, generator=draw.generator) * draw.pick(1.0, 30.0, 1e4)
    empty = torch.rand(lse.shape, generator=draw.generator) < draw.pick(0.0, 0.3, 1.0)
    partials = partials.masked_fill(empty.unsqueeze(-1), NAN)  # an empty partial may hold anything
    lse = draw.laid_out(lse.masked_fill(empty, NEG_INF))
    total, stat_scale = None, 1.0
    if draw.chance(2):
        total = draw.laid_out(torch.rand(lse.shape, generator=draw.generator) + draw.pick(0.0, 1e-3, 1.0))
        stat_scale = draw.pick(1.0, 0.7, 0.01)
    args = [partials, lse, total, draw.sink(heads)]
    groups = draw.pick(*(g for g in (1, 2, 4) if heads % g == 0))
    if rope:
        args += [*draw.tables(tokens, draw.pick(1, 16, 32)), groups]
    if quant:
        block, rule, floor = draw.quantisation(dim)
        args += [block, rule, floor, draw.packing(rule, heads // groups * dim, block)]
    args += [stat_scale, draw.pick(None, 1, 2, 4, 8, 16)]
    if not quant:
        args += ([draw.chance(2)] if not rope else []) + [draw.pick(None, torch.float32, torch.bfloat16)]
    return args


def bgemm(draw):
    groups, tokens, out_rows, width = draw.number(1, 2), draw.number(0, 5), draw.pick(1, 32, 130), draw.pick(128, 256)
    block, weight_block = draw.pick(32, 64, 128), draw.pick(32, 128)

    def codes(*shape):
        x = torch.randint(0, 256, shape, generator=draw.generator).to(torch.uint8)
        return torch.where(x & 0x7F == 0x7F, 0, x).to(torch.uint8).view(torch.float8_e4m3fn)

    columns = (tokens + 3) // 4 * 4
    stored = draw.pick("fp32", "packed") if width % (4 * block) == 0 else "fp32"
    if stored == "packed":
        byte = torch.randint(100, 140, (groups, width // block // 4, 4, columns), generator=draw.generator)
        scales = (byte << torch.arange(0, 32, 8).view(1, 1, 4, 1)).sum(2).to(torch.int32)
    else:
        scales = torch.rand(groups, width // block, columns, generator=draw.generator) * draw.pick(1.0, 1e-20, 1e4)
    shape = (groups, -(-out_rows // weight_block), -(-width // weight_block))
    if draw.chance(2):
        factors = torch.rand(shape, generator=draw.generator) * draw.pick(1.0, 1e-10)
    else:
        factors = torch.randint(110, 140, shape, generator=draw.generator).to(torch.uint8)
        factors = factors.view(torch.float8_e8m0fnu) if draw.chance(2) else factors
    dtype = draw.pick(torch.bfloat16, torch.float32, torch.float16)
    return [codes(groups, tokens, width), draw.laid_out(scales), codes(groups, out_rows, width), factors, block,
            weight_block, dtype]  # fmt: skip


def bits(x):
    return torch.empty(x.shape, dtype=x.dtype).copy_(x).view(torch.uint8)


MAKE = {
    "attention": lambda d: dense(d, False, False),
    "attention_rope": lambda d: dense(d, True, False),
    "attention_rope_quant": lambda d: dense(d, True, True),
    "attention_gathered": lambda d: gathered(d, False, False),
    "attention_gathered_rope": lambda d: gathered(d, True, False),
    "attention_gathered_rope_quant": lambda d: gathered(d, True, True),
    "attention_partials": lambda d: gathered(d, False, False, partial=True),
    "attention_paged_fp8": lambda d: gathered(d, False, False, paged=True),
    "attention_paged_fp8_rope": lambda d: gathered(d, True, False, paged=True),
    "attention_paged_fp8_rope_quant": lambda d: gathered(d, True, True, paged=True),
    "inverse_rope": lambda d: rows(d, False),
    "inverse_rope_quant": lambda d: rows(d, True),
    "merge_partials": lambda d: merge(d, False, False),
    "merge_partials_rope": lambda d: merge(d, True, False),
    "merge_partials_rope_quant": lambda d: merge(d, True, True),
    "fp8_bgemm": bgemm,
}


def launched(name, args):
    """The portable kernel's results, written between guards; None where it refuses these arguments."""
    dispatch.load_providers()
    (launcher,) = [known for known in dispatch._launchers[name] if known.name == "triton"]
    if launcher.refuses(*args) is not None:
        return None
    outs, buffers = [], []
    for like in SPECS[name].empty(*args):
        size = like.element_size()
        buffer = torch.full((like.numel() * size + 2 * GUARD * size,), 0x7F, dtype=torch.uint8)
        outs.append(buffer[GUARD * size : len(buffer) - GUARD * size].view(like.dtype).view(like.shape))
        buffers.append((buffer, GUARD * size))
    if outs[0].numel():
        launcher.launch(tuple(outs), *args)
    for buffer, guard in buffers:
        assert (buffer[:guard] == 0x7F).all() and (buffer[len(buffer) - guard :] == 0x7F).all(), "written outside"
    return outs


def rows_of(name, args):
    """The tensors whose rows a result is made of, as fp32: keys of both pools, partials, or the rows to be rotated."""
    if name.startswith(("inverse", "merge")):
        return [args[0].float()]
    extra = [a for a in args[5:] if isinstance(a, torch.Tensor)]
    if "paged" in name:
        size = args[SCALE_AT[name] + (2 if "rope" in name else 1)]
        pools = [reference.decode_pages(args[1], size, torch.float32)]
        return pools + [reference.decode_pages(a, args[-1], torch.float32) for a in extra if a.dtype == torch.uint8]
    width = args[1].shape[-1]
    return [args[1].float()] + [a.float() for a in extra if a.dim() == 2 and a.shape[-1] == width and
                                a.dtype == args[1].dtype]  # fmt: skip


def magnitude(name, args):
    """The largest finite value that a result is an average (or, for a product, a sum) of."""
    if name == "fp8_bgemm":
        positive = [a.float().abs().to(a.dtype) if a.dtype == torch.float8_e4m3fn else a for a in args[:4]]
        return SPECS[name].reference(*positive, *args[4:6], torch.float32).max().item() if args[0].numel() else 0.0
    tops = [x[torch.isfinite(x)].abs().max().item() for x in rows_of(name, args) if torch.isfinite(x).any()]
    return max(tops, default=0.0) * (math.sqrt(2) if "rope" in name else 1.0)


def score_error(name, args):
    """Bound of the fp32 rounding error of one score, which is the relative error of its weight."""
    if "attention" in name:
        norms = [max(x.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).amax().item() if x.numel() else 0.0 for x in tensors)
                 for tensors in ([args[0].float()], rows_of(name, args))]  # fmt: skip
        doubt = abs(args[SCALE_AT[name]]) * norms[0] * norms[1] * 2**-22
        return doubt if math.isfinite(doubt) else INF
    if name.startswith("merge"):
        tops = args[1][torch.isfinite(args[1])].abs()
        return tops.max().item() * 2**-22 if tops.numel() else 0.0
    return 0.0


SCALE_AT = {
    name: 3 if name == "attention_partials" else (6 if "rope" in name else 4) for name in MAKE if "attention" in name
}


def compare(got, want, allowed, together=1):
    """Elements that the reference gives as finite agree; the others are not finite here either. What is not finite may
    spread to its partner in a rotated pair (``together``): a kernel may turn every pair, by no angle where there is
    none."""
    assert got.dtype == want.dtype and got.shape == want.shape
    got, want = got.double().view(-1, together), want.double().view(-1, together)
    finite = torch.isfinite(want).all(1)
    assert not torch.isfinite(got[~finite]).all(1).any(), "a value that is not finite has disappeared"
    assert torch.isfinite(got[finite]).all(), "a value that is not finite has appeared"
    error = (got - want)[finite].abs()
    assert (error <= allowed).all(), f"{error.max().item():.3g} off, allowed are {allowed:.3g}"


def compare_quantised(args, block, got, want, allowed):
    """Codes times scales: two neighbouring codes, or scales of neighbouring powers of two, are the same number."""
    (codes, scales), (want_codes, want_scales) = got, want
    tokens = codes.shape[1]
    if not tokens:
        return
    assert (scales[..., tokens:] == 0).all(), "padding columns are zero"
    mine, theirs = (reference.dequantise(c, s, block).double() for c, s in ((codes, scales), (want_codes, want_scales)))
    nan = torch.isnan(theirs)
    lost = nan & torch.isfinite(mine)
    assert not (lost.view(*lost.shape[:2], -1, block).all(-1)).any(), "a block that is not finite has become finite"
    sound = torch.isfinite(theirs).view(*nan.shape[:2], -1, block).all(-1, keepdim=True)
    sound = sound.expand(-1, -1, -1, block).flatten(2)
    assert torch.isfinite(mine[sound]).all(), "a value that is not finite has appeared"
    lowest = reference.expand_scales(want_scales, tokens).double().repeat_interleave(block, -1)
    step = 2**-3 * theirs.abs() + 2**-8 * lowest
    error = (mine - theirs).abs() - step
    assert (error[sound] <= allowed).all(), f"{error[sound].max().item():.3g} off beyond a code's step"


@pytest.mark.parametrize("name", MAKE)
@cases(10)
@given(data=st.data())
def test_kernel_agrees_with_the_reference(name, data):
    draw = Draw(data)
    args = SPECS[name].complete(tuple(MAKE[name](draw)), {})
    SPECS[name].check(*args)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    want = SPECS[name].reference(*args)
    want = (want,) if isinstance(want, torch.Tensor) else tuple(want)
    got = launched(name, args)
    tried(name)
    for a, b in zip(args, before):
        if isinstance(a, torch.Tensor) and a.numel():
            assert torch.equal(bits(a), bits(b)), "an input changed"
    if got is None:
        return
    doubt = score_error(name, args)
    if doubt > 0.02:
        # The scores themselves are rounded by more than their differences matter: only guards and finiteness.
        for g, w in zip(got, want):
            if g.is_floating_point() and g.dtype != torch.float8_e4m3fn:
                assert not torch.isfinite(g.double()[torch.isnan(w.double())]).any()
        return
    types = (args[0].dtype if name != "fp8_bgemm" else torch.float32, got[0].dtype)
    allowed = (max(TOLERANCE.get(t, 0.0) for t in types) + 4 * doubt) * magnitude(name, args) + 1e-30
    if name.endswith("_quant"):
        compare_quantised(args, args[list(SPECS[name].signature.parameters).index("block")], got, want, allowed)
        return
    if name == "attention_partials":  # which keys a split takes is the kernel's own business: compare their merge
        got, want = ([reference.merge_partials(*parts, None, None)[0], parts[1].logsumexp(0)] for parts in (got, want))
    compare(got[0], want[0], allowed, 2 if "rope" in name else 1)
    if len(got) > 1 and got[1].numel():
        both = torch.isfinite(want[1])
        assert torch.equal(both, torch.isfinite(got[1])), "empty statistics differ"
        torch.testing.assert_close(got[1][both], want[1][both], rtol=1e-4 + 4 * doubt, atol=1e-3 + 100 * doubt)
