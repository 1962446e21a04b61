"""register_pattern: a user's own function as a role of the chain."""

import engine_ops
import numpy as np
import pytest
import torch
from fusion_pass.kernels import reference
from fusion_pass.patterns.fp8_quant import dequantise
from fusion_pass.patterns.registration import fingerprint
from o_path import HALF, Path, assert_close, roles, run

import fusion_pass


@pytest.fixture(autouse=True)
def forget():
    yield
    for one in fusion_pass.registered_patterns():
        fusion_pass.unregister_pattern(one.name)


def numpy_rotation(o, cos, sin):
    """A spelling that no tracer reads."""
    x, c, s = o.float().numpy().copy(), cos.float().numpy()[:, None], sin.float().numpy()[:, None]
    even, odd = x[..., -64::2].copy(), x[..., -63::2].copy()
    x[..., -64::2], x[..., -63::2] = even * c + odd * s, odd * c - even * s
    return torch.from_numpy(np.ascontiguousarray(x)).to(o.dtype)


def torch_rotation(o, cos, sin):
    even, odd = o[..., -64::2].float(), o[..., -63::2].float()
    c, s = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    turned = torch.stack((even * c + odd * s, odd * c - even * s), -1).flatten(-2)
    return torch.cat((o[..., :-64], turned.to(o.dtype)), -1)


def path_with(rotate, p):
    weight = torch.randn(p.groups, p.rows, p.width, generator=torch.Generator().manual_seed(3)).bfloat16() * 0.02

    def fn(o, positions, cache, weight):
        tables = cache[positions]
        x = rotate(o, tables[:, :HALF], tables[:, HALF:]).view(o.shape[0], p.groups, -1)
        return torch.einsum("tgk,grk->tgr", x, weight)

    return fn, (p.o, p.positions, p.cache, weight)


def test_an_unreadable_function_is_fused():
    rotate = fusion_pass.register_pattern("inverse_rope", name="mine")(numpy_rotation)
    p = Path()
    fn, args = path_with(rotate, p)
    got = run(fn, *args)
    assert roles(got) == [("inverse_rope", "bgemm")], got.report
    assert not any("fusion_pass_user" in op for op in got.ops)
    assert got.report.notes == ["registered pattern mine (inverse_rope), 1x: fused"]
    assert_close(got.out, fn(*args))


def test_unregistered_function_with_an_op_stays_opaque():
    """The same function, as an op that nobody registered: nothing is known about it."""
    engine_ops.define("numpy_rope::rotate", "(Tensor o, Tensor cos, Tensor sin) -> Tensor", numpy_rotation,
                      lambda o, cos, sin: torch.empty_like(o))
    fn, args = path_with(torch.ops.numpy_rope.rotate, Path())
    assert not run(fn, *args).report.fused
    fusion_pass.register_pattern("inverse_rope")(torch.ops.numpy_rope.rotate)
    got = run(fn, *args)
    assert roles(got) == [("inverse_rope", "bgemm")], got.report
    assert fusion_pass.registered_patterns()[0].name == "numpy_rope::rotate"
    assert_close(got.out, fn(*args))


@pytest.mark.parametrize("rule", ["mine", "inverse_rope"])
def test_disable_rules(rule):
    rotate = fusion_pass.register_pattern("inverse_rope", name="mine")(torch_rotation)
    fn, args = path_with(rotate, Path())
    plain = run(fn, *args, disable=True)
    assert any("fusion_pass_user.mine" in op for op in plain.ops), plain.ops
    got = run(fn, *args, disable_rules=(rule,))
    assert not got.report.fused and got.ops == plain.ops
    assert torch.equal(got.out, plain.out)


def test_a_call_in_no_chain_is_the_function_itself():
    calls = []

    @fusion_pass.register_pattern("inverse_rope")
    def counted(o, cos, sin):
        calls.append(type(o))
        return torch_rotation(o, cos, sin)

    def fn(o, cos, sin):
        return counted(o, cos, sin).relu()

    p = Path()
    tables = p.cache[p.positions]
    got = run(fn, p.o, tables[:, :HALF], tables[:, HALF:])
    assert not got.report.fused and any("counted" in op for op in got.ops)
    assert got.report.notes == ["registered pattern counted (inverse_rope), 1x: left as it was (in no fused chain)"]
    assert torch.equal(got.out, torch_rotation(p.o, tables[:, :HALF], tables[:, HALF:]).relu())
    assert torch.Tensor in calls


def test_a_chain_of_registered_functions():
    """Quantisation with the user's conventions, and the user's own product, in one chain."""
    @fusion_pass.register_pattern("fp8_quant", scale_rule="ue8m0", floor=1e-4)
    def my_quant(x):
        codes, scales = reference.quantise(x.float(), 128, "ue8m0", 1e-4)
        return codes, scales[..., :x.shape[1]].transpose(1, 2).contiguous()

    @fusion_pass.register_pattern("bgemm")
    def my_product(x, weight):
        return torch.from_numpy(np.einsum("tgk,grk->tgr", x.double().numpy(), weight.double().numpy())).to(x.dtype)

    p = Path()
    weight = torch.randn(p.groups, p.rows, p.width, generator=torch.Generator().manual_seed(3)) * 0.02

    def fn(o, positions, weight):
        codes, scales = my_quant(p.rotated(o).view(o.shape[0], p.groups, -1))
        return my_product(dequantise(codes, scales), weight)

    got = run(fn, p.o, p.positions, weight)
    assert roles(got) == [("inverse_rope", "fp8_quant", "bgemm")], got.report
    assert got.report.fused[0].quant == "ue8m0"
    assert not any("my_quant" in op for op in got.ops)
    assert any("my_product" in op for op in got.ops), "no kernel for this product: the user's stays"
    assert_close(got.out, fn(p.o, p.positions, weight))


def test_wrong_sign_is_refused_with_both_expressions():
    with pytest.raises(ValueError) as caught:
        @fusion_pass.register_pattern("inverse_rope")
        def forward_rotation(o, cos, sin):
            return torch_rotation(o, cos, -sin)
    message = str(caught.value)
    assert "forward_rotation with torch.float32, o [3, 4, 512]" in message
    assert "element [0, 0, 448] is" in message
    assert "it computes o[0,0,448]*cos[0,0] - o[0,0,449]*sin[0,0]" in message
    assert "the role o[0,0,448]*cos[0,0] + o[0,0,449]*sin[0,0]" in message
    assert not fusion_pass.registered_patterns()


def test_unreadable_wrong_function_is_refused_with_both_values():
    def swapped(o, cos, sin):
        return numpy_rotation(o, sin, cos)
    with pytest.raises(ValueError, match=r"element \[0, 0, 448\] is .*, expected [-0-9.e]+$"):
        fusion_pass.register_pattern("inverse_rope")(swapped)


def test_wrong_dtype():
    with pytest.raises(ValueError, match="bfloat16.*the result has dtype torch.float32, expected torch.bfloat16"):
        fusion_pass.register_pattern("inverse_rope")(lambda o, cos, sin: torch_rotation(o.float(), cos, sin))


def test_wrong_conventions_of_the_quantisation():
    def raw(x):
        codes, scales = reference.quantise(x.float(), 128, "fp32", 1e-12)
        return codes, scales[..., :x.shape[1]].transpose(1, 2)

    with pytest.raises(ValueError, match="fp8_quant.*result 0: element"):
        fusion_pass.register_pattern("fp8_quant", scale_rule="ue8m0")(raw)
    with pytest.raises(ValueError, match="has no option 'blocks'"):
        fusion_pass.register_pattern("fp8_quant", blocks=64)
    fusion_pass.register_pattern("fp8_quant")(raw)


def test_changing_an_argument_is_refused():
    def in_place(o, cos, sin):
        o.copy_(torch_rotation(o, cos, sin))
        return o
    with pytest.raises(ValueError, match="changes its argument o in place: work on a clone"):
        fusion_pass.register_pattern("inverse_rope")(in_place)


def test_signature_and_names():
    with pytest.raises(TypeError, match=r"takes 3 arguments \(o, cos, sin\), f takes 2"):
        def f(o, angle):
            return o
        fusion_pass.register_pattern("inverse_rope")(f)
    with pytest.raises(ValueError, match="unknown role 'rope'"):
        fusion_pass.register_pattern("rope")
    with pytest.raises(TypeError, match="expected a function or an op, got int"):
        fusion_pass.register_pattern("inverse_rope")(3)
    fusion_pass.register_pattern("inverse_rope", name="mine")(torch_rotation)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        fusion_pass.register_pattern("inverse_rope", name="mine")(torch_rotation)
    with pytest.raises(KeyError, match="registered: mine"):
        fusion_pass.unregister_pattern("other")


def test_keyword_arguments_and_gradients():
    rotate = fusion_pass.register_pattern("inverse_rope")(torch_rotation)
    p = Path()
    tables = p.cache[p.positions]
    want = torch_rotation(p.o, tables[:, :HALF], tables[:, HALF:])
    assert torch.equal(rotate(p.o, sin=tables[:, HALF:], cos=tables[:, :HALF]), want)
    o = p.o.float().requires_grad_()
    rotate(o, tables[:, :HALF], tables[:, HALF:]).sum().backward()
    assert o.grad is not None and float(o.grad.abs().sum()) > 0


def test_listing_and_cache_identity():
    assert fingerprint() == ""
    fusion_pass.register_pattern("inverse_rope", name="mine")(torch_rotation)
    one, = fusion_pass.registered_patterns()
    assert str(one).startswith("mine: inverse_rope (op fusion_pass_user::mine_")
    first = fingerprint()
    assert first
    fusion_pass.register_pattern("kv_merge", name="merge")(fusion_pass.patterns.kv_merge.kv_merge)
    assert fingerprint() not in ("", first)
    from fusion_pass.fingerprint import registered_patterns
    assert registered_patterns() == fingerprint()


def test_explain_names_it():
    rotate = fusion_pass.register_pattern("inverse_rope", name="mine")(numpy_rotation)
    fn, args = path_with(rotate, Path())
    with torch.no_grad():
        report = fusion_pass.explain(fn)(*args)
    assert [c.roles for c in report.fused] == [("inverse_rope", "bgemm")]
    assert any("registered pattern mine" in note for note in report.notes)
