# SPDX-License-Identifier: Apache-2.0
"""Registration: opcheck, fakes against real outputs, out-variants, empty inputs, strides, bad inputs."""

import importlib

import pytest
import torch
from fusion_pass.kernels.ops import SPECS
from fusion_pass.kernels.ops import attention as attention_module
from op_cases import DEVICES, Maker, every_op, relative_error
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

ops = torch.ops.fusion_pass
CASES = range(len(every_op(Maker())))
NAMES = {
    "attention", "attention_rope", "attention_rope_quant", "attention_gathered", "attention_gathered_rope",
    "attention_gathered_rope_quant", "attention_partials", "attention_paged_fp8", "attention_paged_fp8_rope",
    "attention_paged_fp8_rope_quant", "inverse_rope", "inverse_rope_quant", "merge_partials", "merge_partials_rope",
    "merge_partials_rope_quant", "fp8_bgemm",
}  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def as_tuple(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def bits(x):
    return x.contiguous().view(torch.uint8) if x.numel() else x


def test_every_op_is_covered():
    assert set(SPECS) == NAMES == {name for name, _, _ in every_op(Maker())}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(device, case):
    name, args, kwargs = every_op(Maker(device, torch.bfloat16 if case % 2 else torch.float32))[case]
    # merge cases hold NaN behind empty partials, which opcheck's argument comparison takes for a mutation.
    args = tuple(a.nan_to_num(0.0) if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a for a in args)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name != "fp8_bgemm":  # opcheck compares inputs before and after with arithmetic that E4M3 does not have
        checks.append("test_schema")
    torch.library.opcheck(getattr(ops, name).default, args, kwargs, test_utils=checks)


def test_bgemm_leaves_its_inputs_alone(device):
    args = Maker(device).bgemm()
    before = [bits(a).clone() for a in args]
    out = ops.fp8_bgemm(*args)
    assert all(torch.equal(bits(a), b) for a, b in zip(args, before))
    assert out.untyped_storage().data_ptr() not in {a.untyped_storage().data_ptr() for a in args}


@pytest.mark.parametrize("case", CASES)
def test_fake_matches_real(device, case):
    """Shapes, dtypes and strides of the fake, with every size symbolic, equal those of the real call."""
    name, args, kwargs = every_op(Maker(device))[case]
    op = getattr(ops, name).default
    real = as_tuple(op(*args, **kwargs))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake_args, fake_kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: mode.from_tensor(t), (args, kwargs)
        )
        fake = as_tuple(op(*fake_args, **fake_kwargs))
    for r, f in zip(real, fake):
        assert tuple(map(int, f.shape)) == tuple(r.shape) and tuple(map(int, f.stride())) == r.stride()
        assert f.dtype == r.dtype and r.is_contiguous()


@pytest.mark.parametrize("case", CASES)
def test_token_count_stays_dynamic(case):
    """Tracing with a symbolic token count adds no guard on it, beyond its range."""
    from torch.export import Dim, export

    name, args, kwargs = every_op(Maker(), tokens=6)[case]
    op = getattr(ops, name).default
    if name == "fp8_bgemm":
        pytest.skip("its scale operand's width is a function of the token count: see test_quant_to_bgemm_dynamic")
    leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}

    class Call(torch.nn.Module):
        def forward(self, *given):
            filled = dict(zip(tensors, given))
            a, k = torch.utils._pytree.tree_unflatten([filled.get(i, leaf) for i, leaf in enumerate(leaves)], tree)
            return op(*a, **k)

    tokens = Dim("tokens", min=2, max=4096)
    spec = tuple({d: tokens for d, s in enumerate(t.shape) if s == 6} for t in tensors.values())
    program = export(Call(), tuple(tensors.values()), dynamic_shapes=(spec,))
    sizes = [n.meta["val"] for n in program.graph.nodes if n.op == "call_function" and "fusion_pass" in str(n.target)]
    assert any(isinstance(s, torch.SymInt) for s in as_tuple(sizes[0])[0].shape)


def test_quant_to_bgemm_dynamic():
    from torch.export import Dim, export

    m = Maker()
    _, _, weight, factors = m.bgemm(tokens=6, rows=64, k=256)

    class Chain(torch.nn.Module):
        def forward(self, o, cos, sin):
            codes, scales = ops.inverse_rope_quant(o, cos, sin, 2)
            return ops.fp8_bgemm(codes, scales, weight, factors)

    args = (m.normal(6, 4, 128), *m.rope(6))
    program = export(Chain(), args, dynamic_shapes=({0: Dim("tokens", min=2, max=4096)},) * 3)
    other = (m.normal(9, 4, 128), *m.rope(9))
    assert torch.equal(program.module()(*other), Chain()(*other))


@pytest.mark.parametrize("case", CASES)
def test_out_variant(device, case):
    """Out-variants write into poisoned buffers, contiguous or not, exactly what the functional op returns."""
    name, args, kwargs = every_op(Maker(device))[case]
    want = as_tuple(getattr(ops, name).default(*args, **kwargs))
    names = SPECS[name].outputs
    for strided in (False, True):
        outs = []
        for w in want:
            buffer = torch.empty((*w.shape, 2) if strided else w.shape, dtype=w.dtype, device=device)
            buffer.view(torch.uint8).fill_(0x7F)
            outs.append(buffer[..., 0] if strided else buffer)
        getattr(ops, name).out(*args, **kwargs, **dict(zip(names, outs)))
        for w, o in zip(want, outs):
            assert torch.equal(bits(o), bits(w))


def test_inductor_passes_arguments_in_order():
    """Every op with an absent tensor before a present one, and with arguments by name, compiled by Inductor."""
    m, groups, scale = Maker(), 2, 0.09
    q, kv, _, sink = m.dense(batch=1, queries=5)
    wide, rope = m.rope(1, 5), m.rope(5)
    gq, pool, indices, _ = m.gathered()
    partials, lse = m.partials(tokens=5)
    paged = m.paged()
    more = {"extra_kv": pool, "extra_indices": indices}

    def calls():
        return [
            ops.attention(q, kv, None, sink, scale, window=3),
            ops.attention_rope(q, kv, None, sink, *wide, scale, groups, causal=True, batch_invariant=True),
            *ops.attention_rope_quant(q, kv, None, sink, *wide, scale, groups, block=32),
            ops.attention_gathered(gq, pool, indices, None, scale, **more),
            ops.attention_gathered_rope(gq, pool, indices, None, *rope, scale, groups, check_inputs=True),
            *ops.attention_gathered_rope_quant(gq, pool, indices, None, *rope, scale, groups, **more),
            ops.attention_paged_fp8_rope(*paged[:3], None, *rope, scale, groups, 8),
            ops.merge_partials(partials, lse, None, sink, return_stats=True)[0],
            ops.merge_partials_rope(partials, lse, None, sink, *rope, groups, kv_split=2),
            *ops.merge_partials_rope_quant(partials, lse, None, sink, *rope, groups, kv_split=2, stat_scale=1.0),
        ]

    with fresh_cache(), torch.no_grad():
        compiled = torch.compile(calls, fullgraph=True)()
        for got, want in zip(compiled, calls(), strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


def test_out_variant_refuses_wrong_buffer(device):
    name, args, kwargs = every_op(Maker(device))[0]
    good = ops.attention(*args, **kwargs)
    with pytest.raises(ValueError, match="the result's shape"):
        ops.attention.out(*args, **kwargs, out=good[:, :-1].contiguous())
    with pytest.raises(TypeError, match="float32"):
        ops.attention.out(*args, **kwargs, out=good.bfloat16())


@pytest.mark.parametrize("case", CASES)
def test_no_tokens(device, case):
    name, args, kwargs = every_op(Maker(device), tokens=0)[case]
    for out in as_tuple(getattr(ops, name).default(*args, **kwargs)):
        assert out.numel() == 0


@pytest.mark.parametrize("case", CASES)
def test_any_strides(device, case):
    """Operands with odd strides give the result of their contiguous copies: the same bits on a GPU. On a CPU the
    reference's products come from a library, which may add in another order where strides are odd."""
    name, args, kwargs = every_op(Maker(device))[case]
    want = as_tuple(getattr(ops, name).default(*args, **kwargs))

    def spread(x):
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            return x
        if x.dtype == torch.float8_e8m0fnu:
            return spread(x.view(torch.uint8)).view(torch.float8_e8m0fnu)
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
        wide[..., ::2].copy_(x)
        return wide[..., ::2]

    args, kwargs = torch.utils._pytree.tree_map(spread, (args, kwargs))
    for w, g in zip(want, as_tuple(getattr(ops, name).default(*args, **kwargs))):
        if device.type == "cuda" or not w.is_floating_point():
            assert torch.equal(bits(g), bits(w))
        else:
            rounded = w.dtype == torch.float8_e4m3fn
            g, w = (x.double().nan_to_num(posinf=1e300, neginf=-1e300) for x in (g, w))
            assert relative_error(g, w) < (1e-2 if rounded else 1e-6)


def test_backward_is_refused():
    q, kv, mask, sink = Maker().dense()
    out = ops.attention(q.requires_grad_(), kv, mask, sink, 0.1)
    with pytest.raises(NotImplementedError, match="inference op"):
        out.sum().backward()


def test_reload_and_second_import():
    """Importing the definitions again, also under the checkout's top-level name, registers nothing twice."""
    importlib.reload(attention_module)
    q, kv, mask, sink = Maker().dense()
    assert ops.attention(q, kv, mask, sink, 0.1).shape == q.shape


def replaced(args, position, value):
    return (*args[:position], value, *args[position + 1 :])


def bad_dense():
    m = Maker()
    args = (*m.dense(mask="float"), *m.rope(2, 5), 0.1, 2)
    q, kv, mask, sink, cos, sin = args[:6]
    return args, [
        (0, q[0], ValueError, r"q of shape \[B, S, H, D\]"),
        (0, q.int(), TypeError, "q of dtype"),
        (1, kv.bfloat16(), TypeError, "kv of dtype float32, got bfloat16"),
        (1, kv[..., :64], ValueError, "kv of shape"),
        (1, kv.expand(1, 2, 17, 128)[0].repeat(2, 1, 1), ValueError, "kv of shape"),
        (2, mask[..., :-1], ValueError, "mask of shape"),
        (2, mask[:, :1], ValueError, "mask of shape"),
        (2, mask.int(), TypeError, "mask of dtype"),
        (3, sink[:-1], ValueError, "sink of shape"),
        (3, sink.int(), TypeError, "sink of dtype"),
        (4, cos[:, :-1], ValueError, "cos of shape.*own position"),
        (5, sin[..., :-1], ValueError, "shape of cos"),
        (4, cos.int(), TypeError, "cos of dtype"),
        (6, float("nan"), ValueError, "finite scale"),
        (7, 3, ValueError, "groups to divide the 4 heads"),
        (7, 0, ValueError, "groups >= 1"),
        (0, q.to("meta"), ValueError, "on "),
    ]


@pytest.mark.parametrize("case", range(len(bad_dense()[1])))
def test_bad_dense(case):
    args, cases = bad_dense()
    position, value, error, message = cases[case]
    with pytest.raises(error, match=message):
        ops.attention_rope(*replaced(args, position, value))


@pytest.mark.parametrize("kwargs,message", [
    ({"block": 48}, "block width"), ({"block": 0}, "block width"), ({"scale_rule": "UE8M0"}, "scale_rule"),
    ({"floor": 0.0}, "floor"), ({"floor": float("nan")}, "floor"), ({"floor": 1e-40}, "floor"),
    ({"pack_scales": True}, "ue8m0"), ({"pack_scales": True, "scale_rule": "ue8m0"}, r"4 \* block"),
])  # fmt: skip
def test_bad_quantisation(kwargs, message):
    m = Maker()
    with pytest.raises(ValueError, match=message):
        ops.inverse_rope_quant(m.normal(3, 4, 128), *m.rope(3), 2, **kwargs)


def test_bad_rope_width():
    m = Maker()
    with pytest.raises(ValueError, match="at most 64 columns"):
        ops.inverse_rope(m.normal(3, 4, 128), *m.rope(3, half=65), 2)
    with pytest.raises(ValueError, match="own position"):
        ops.inverse_rope(m.normal(3, 4, 128), *m.rope(2), 2)


def bad_gathered():
    m = Maker()
    args = (*m.gathered(), 0.1, *m.second_pool())
    q, kv, indices, _, _, lengths, extra_kv, extra_indices, _ = args
    return args, [
        (0, q[0], ValueError, "q of shape"),
        (1, kv.unsqueeze(1), ValueError, "Flatten a paged cache"),
        (2, indices[:-1], ValueError, "indices of shape"),
        (2, indices.float(), TypeError, "indices of dtype int32, int64"),
        (5, lengths[:-1], ValueError, "lengths of shape"),
        (5, lengths.float(), TypeError, "lengths of dtype"),
        (6, extra_kv.double(), TypeError, "extra_kv of dtype"),
        (6, None, ValueError, "extra_kv and extra_indices together"),
        (7, None, ValueError, "extra_kv and extra_indices together"),
        (7, extra_indices[:2], ValueError, "extra_indices of shape"),
    ]


@pytest.mark.parametrize("case", range(len(bad_gathered()[1])))
def test_bad_gathered(case):
    args, cases = bad_gathered()
    position, value, error, message = cases[case]
    with pytest.raises(error, match=message):
        ops.attention_gathered(*replaced(args, position, value))


def test_bad_partials_and_merge():
    m = Maker()
    q, kv, indices, _ = m.gathered()
    with pytest.raises(ValueError, match="num_splits"):
        ops.attention_partials(q, kv, indices, 0.1, 0)
    partials, lse = m.partials()
    with pytest.raises(ValueError, match="at least one partial"):
        ops.merge_partials(partials[:0], lse[:0], None, None)
    with pytest.raises(ValueError, match="lse_or_max of shape"):
        ops.merge_partials(partials, lse[:-1], None, None)
    with pytest.raises(TypeError, match="lse_or_max of dtype float32"):
        ops.merge_partials(partials, lse.bfloat16(), None, None)
    with pytest.raises(ValueError, match="kv_split"):
        ops.merge_partials(partials, lse, None, None, kv_split=3)
    with pytest.raises(ValueError, match="stat_scale > 0"):
        ops.merge_partials(partials, lse, lse, None, stat_scale=0.0)
    with pytest.raises(ValueError, match="normalised partials"):
        ops.merge_partials(partials, lse, None, None, stat_scale=0.5)
    with pytest.raises(TypeError, match="out_dtype"):
        ops.merge_partials(partials, lse, None, None, out_dtype=torch.int8)


def bad_bgemm():
    args = (*Maker().bgemm(), 128, 128, torch.bfloat16)
    codes, scales, weight, factors = args[:4]
    return args, [
        (0, codes.float(), TypeError, "codes of dtype float8_e4m3fn"),
        (0, codes[0], ValueError, "codes of shape"),
        (1, scales[..., :5], ValueError, "Pad the token columns"),
        (1, scales.double(), TypeError, "scales of dtype"),
        (2, weight[:1], ValueError, "weight of shape"),
        (3, factors[:, :1], ValueError, "weight_scales of shape"),
        (3, factors.half(), TypeError, "weight_scales of dtype"),
        (4, 96, ValueError, "block to divide K"),
        (5, 0, ValueError, "weight_block to divide K"),
        (6, torch.int8, TypeError, "out_dtype"),
    ]


@pytest.mark.parametrize("case", range(len(bad_bgemm()[1])))
def test_bad_bgemm(case):
    args, cases = bad_bgemm()
    position, value, error, message = cases[case]
    with pytest.raises(error, match=message):
        ops.fp8_bgemm(*replaced(args, position, value))


def test_decisions_are_remembered_by_signature(monkeypatch):
    """Calls of one form validate and choose once; a wrong form is refused every time; other sizes, strides, alignment,
    dtypes, scalars and modes decide anew; a newly registered launcher forgets everything; the memory is bounded."""
    from fusion_pass.kernels.ops import Launcher, decisions, register_launcher

    spec, decided = SPECS["attention_gathered"], []
    right = spec.check
    object.__setattr__(spec, "check", lambda *args: decided.append(1) or right(*args))
    try:
        m = Maker()
        q, kv, indices, sink = m.gathered()

        def call(*args, **kwargs) -> int:
            decided.clear()
            ops.attention_gathered(*args, **kwargs)
            return len(decided)

        decisions._known.clear()
        assert [call(q, kv, indices, sink, 0.1), call(q + 1, kv * 2, indices, sink, 0.1)] == [1, 0]
        shifted = torch.cat((torch.zeros(1), q.flatten()))[1:].view(q.shape)
        others = [
            (q, kv, indices, sink, 0.2), (q, kv, indices, None, 0.1), (q, kv, indices.long(), sink, 0.1),
            (q.transpose(1, 2).contiguous().transpose(1, 2), kv, indices, sink, 0.1), (shifted, kv, indices, sink, 0.1),
            (q[:4], kv, indices[:4], sink, 0.1), (q.bfloat16(), kv.bfloat16(), indices, sink, 0.1),
        ]  # fmt: skip
        assert [call(*args) for args in others] == [1] * len(others)
        assert [call(*args) for args in others] == [0] * len(others)
        assert call(q, kv, indices, sink, 0.1, batch_invariant=True) == 1
        with pytest.raises(ValueError, match=r"indices\[0, 0\]"):
            ops.attention_gathered(q, kv, torch.full_like(indices, 99), sink, 0.1, check_inputs=True)
        ops.attention_gathered(q, kv, torch.zeros_like(indices), sink, 0.1, check_inputs=True)
        with pytest.raises(ValueError, match=r"indices\[0, 0\]"):  # values are read at every call
            ops.attention_gathered(q, kv, torch.full_like(indices, 99), sink, 0.1, check_inputs=True)
        for _ in range(2):
            with pytest.raises(ValueError, match="finite scale"):
                ops.attention_gathered(q, kv, indices, sink, float("nan"))
        register_launcher("attention_gathered", Launcher("nobody", lambda *args: "a test", lambda *args: None))
        assert [call(q, kv, indices, sink, 0.1), call(q, kv, indices, sink, 0.1)] == [1, 0]
        monkeypatch.setattr(decisions, "LIMIT", 3)
        for scale in range(9):
            call(q, kv, indices, sink, 1.0 + scale)
            assert len(decisions._known) <= 3
    finally:
        object.__setattr__(spec, "check", right)
