"""A dynamic token dimension: one graph for all lengths, fused the same, without a guard of ours.

The corpus's functions mostly take the number of tokens from the scope around them, which makes Dynamo specialise on it
whatever the backend. So the cases are traced with make_fx, where that captured number can be a symbol; what Dynamo
itself does is tested on two spellings that read the number from their tensors.
"""

import types

import pytest
import torch
from compiling import FLEX, POSITIVES, case, difference, eager, problems
from run_all import flat, fresh
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

import fusion_pass
from fusion_pass import Config
from fusion_pass.advice import advice

SINCE_2_15 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
TOKENS = 11         # a number that nothing else in a case has
# These run a Python loop over tokens (or compute counts from them in Python), so a graph holds for one count only.
SPECIALISED = {
    "pos_17_deepgemm_per_token_cast_fp32": "pads a row count that it computes from the captured number",
    "pos_41_polar_in_graph_yarn_freqs": "reshapes to a shape that it captured as a tuple",
    "pos_61_sdpa_sink_as_augmented_lane": "reshapes to a shape that it captured as a tuple",
    "pos_54_per_token_bmm_group_weights": "a Python loop over tokens",
}


def with_symbol(value, symbol, seen):
    """A function with the captured number of tokens replaced by ``symbol``, in all functions that it captured too."""
    if type(value) is int and value == TOKENS:
        return symbol
    if isinstance(value, types.FunctionType) and value.__closure__ and id(value) not in seen:
        seen.add(id(value))
        cells = tuple(types.CellType(with_symbol(cell.cell_contents, symbol, seen)) for cell in value.__closure__)
        return types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    return value


def symbolic_graph(name):
    """The functional ATen graph of a case with every dimension that follows the number of tokens symbolic."""
    module, fn, args = case(name, tokens=TOKENS)
    _, _, others = case(name, tokens=TOKENS + 2)
    (args, structure), (others, _) = pytree.tree_flatten(args), pytree.tree_flatten(others)
    dims = [(i, d) for i, (a, b) in enumerate(zip(args, others)) if isinstance(a, torch.Tensor)
            for d, (x, y) in enumerate(zip(a.shape, b.shape)) if (x, y) == (TOKENS, TOKENS + 2)]
    if not dims:
        pytest.skip("no dimension of an input is the number of tokens")

    def run(*inputs):
        where, dim = dims[0]
        return with_symbol(fn, inputs[where].shape[dim], set())(*pytree.tree_unflatten(inputs, structure))

    # Only these dimensions are symbols: everything else is as static as parameters are under torch.compile.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = []
    for i, a in enumerate(pytree.tree_leaves(fresh(args))):
        if not isinstance(a, torch.Tensor):
            inputs.append(a)
            continue
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC if (i, d) in dims else DimDynamic.STATIC
                                            for d in range(a.dim())])
        inputs.append(mode.from_tensor(a, symbolic_context=context, source=ConstantSource(f"input_{i}")))
    with torch.no_grad(), mode, enable_python_dispatcher():
        functional = torch.func.functionalize(run, remove="mutations")
        gm = make_fx(functional, tracing_mode="fake")(*inputs)
    return module, gm


def holds_for_one_count(name, gm):
    """Does the graph as traced (before the pass) fail for another number of tokens?"""
    for tokens in (TOKENS + 5, 40):
        _, _, args = case(name, tokens=tokens)
        try:
            gm(*pytree.tree_leaves(fresh(args)))
        except RuntimeError:
            return True
    return False


def shape_env(gm):
    for node in gm.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


@pytest.mark.parametrize("name", [name for name in POSITIVES if name not in FLEX])
def test_symbolic_tokens(name):
    if name in SPECIALISED:
        pytest.skip(SPECIALISED[name])
    try:
        module, gm = symbolic_graph(name)
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"cannot be traced with a symbolic number: {str(error).splitlines()[0]}")
    env = shape_env(gm)
    if env is None or holds_for_one_count(name, gm):        # judged on the graph as traced, before the pass
        pytest.skip("the source itself specialises on the number of tokens")
    guards = len(env.guards)
    with torch.no_grad():
        report = fusion_pass.rewrite(gm, Config(strict=True))
        assert not problems(name, module.EXPECT, report)
        assert len(env.guards) == guards
        for tokens in (2, 7, TOKENS, 40):
            _, fn, args = case(name, tokens=tokens)
            try:
                _, fn, args = case(name, tokens=tokens)
                wanted = eager(fn, args)
            except Exception:
                continue        # a case that wants more keys than tokens
            assert difference(flat(gm(*pytree.tree_leaves(fresh(args)))), wanted) < 2e-2


def official(q, kv, sink, freqs, weight):
    """In-place complex rotation of the attention output's tail, then an einsum over groups."""
    scores = torch.einsum("bshd,bnd->bshn", q.float(), kv.float()) * q.shape[-1] ** -0.5
    column = sink.view(1, 1, -1, 1).expand(q.shape[0], q.shape[1], -1, -1)
    p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    o = torch.einsum("bshn,bnd->bshd", p, kv.float()).to(q.dtype)
    tail = o[..., -64:]
    turned = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2))) * freqs.conj()[None, :, None]
    tail.copy_(torch.view_as_real(turned).flatten(-2))
    return torch.einsum("bsgd,grd->bsgr", o.view(o.shape[0], o.shape[1], 2, -1), weight)


def quantised(q, kv, sink, freqs, weight):
    """Stacked real rotation, block quantisation with raw scales, bmm over groups."""
    t = q.shape[1]
    scores = torch.matmul(q.float().transpose(1, 2), kv.float().unsqueeze(1).transpose(2, 3)) * q.shape[-1] ** -0.5
    top = torch.maximum(scores.amax(-1, keepdim=True), sink.view(1, -1, 1, 1))
    e = torch.exp(scores - top)
    p = e / (e.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1, 1) - top))
    o = torch.matmul(p, kv.float().unsqueeze(1)).transpose(1, 2).to(q.dtype)
    even, odd = o[..., -64::2].float(), o[..., -63::2].float()
    cos, sin = freqs.real[None, :, None], freqs.imag[None, :, None]
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2).to(o.dtype)
    x = torch.cat([o[..., :-64], turned], -1).reshape(t, 2, -1, 128).float()
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448.0
    x = ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).reshape(t, 2, -1)
    return torch.bmm(x.transpose(0, 1), weight.float().transpose(1, 2)).transpose(0, 1)


def inputs_for(tokens):
    g = torch.Generator().manual_seed(tokens)
    def normal(*shape):
        return torch.randn(*shape, generator=g)
    angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    return (normal(1, tokens, 8, 512).bfloat16(), normal(1, 24, 512).bfloat16(), normal(8),
            torch.polar(torch.ones_like(angle), angle), (normal(2, 16, 2048) / 45).bfloat16())


def marked(inputs):
    torch._dynamo.maybe_mark_dynamic(inputs[0], 1)
    torch._dynamo.maybe_mark_dynamic(inputs[3], 0)
    return inputs


def guards_of(fn):
    """The guards of each compiled version, without the addresses of Python objects."""
    def plain(entry):
        lines = str(entry.guard_manager).splitlines()
        return [line for line in lines if "0x" not in line and "ID_MATCH" not in line and "ALIASING" not in line]
    return [plain(entry) for entry in _debug_get_cache_entry_list(fn.__code__)]


@pytest.mark.parametrize("fn, roles", [
    (official, ("fmha", "inverse_rope", "bgemm")), (quantised, ("fmha", "inverse_rope", "fp8_quant", "bgemm"))])
def test_one_compilation_and_no_added_guards(fn, roles):
    guards = {}
    for backend, options in (("aot_eager", None), ("fusion_pass", {"inner": "aot_eager", "strict": True})):
        torch._dynamo.reset()
        before = len(fusion_pass.reports())
        compiled = torch.compile(fn, backend=backend, fullgraph=True, options=options)
        with torch.no_grad():
            for tokens in (7, 2, 4096):
                inputs = inputs_for(tokens)
                assert difference([compiled(*marked(inputs))], [fn(*fresh(inputs))]) < 2e-2
            guards[backend] = guards_of(fn)
            # AOTAutograd of torch 2.15 itself compiles the two tokens of the quantised one anew, with any backend.
            assert len(guards[backend]) == 1 or SINCE_2_15 and len(guards[backend]) == len(guards["aot_eager"]) == 2
            compiled(*inputs_for(1))
            assert len(guards_of(fn)) <= len(guards[backend]) + 1
        reports = fusion_pass.reports()[before:]
        if backend == "fusion_pass":
            assert reports and all([c.roles for c in r.fused] == [roles] for r in reports), reports
    assert guards["fusion_pass"] == guards["aot_eager"]


E4M3_MAX = 448.0


def quantised_by_module_constant(q, kv, sink, freqs, weight):
    """``quantised`` with the limit of E4M3 kept in the module, as many sources have it."""
    t = q.shape[1]
    o = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2).float(), kv.float().unsqueeze(1).expand(-1, q.shape[2], -1, -1),
        kv.float().unsqueeze(1).expand(-1, q.shape[2], -1, -1)).transpose(1, 2).to(q.dtype)
    even, odd = o[..., -64::2].float(), o[..., -63::2].float()
    cos, sin = freqs.real[None, :, None], freqs.imag[None, :, None]
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2).to(o.dtype)
    x = torch.cat([o[..., :-64], turned], -1).reshape(t, 2, -1, 128).float()
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    x = ((x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale).reshape(t, 2, -1)
    return torch.bmm(x.transpose(0, 1), weight.float().transpose(1, 2)).transpose(0, 1)


def test_a_module_constant_that_dynamo_made_an_input_is_named():
    """Under dynamic=True a global float is an input that the next call may change: refused, with the way out. Torch
    2.15 makes no inputs of them; there it is the sizes, all of them symbols, that the chain does not hold for."""
    for dynamic, fused in ((True, 0), (None, 1)):
        torch._dynamo.reset()
        before = len(fusion_pass.reports())
        compiled = torch.compile(quantised_by_module_constant, backend="fusion_pass", dynamic=dynamic,
                                 options={"inner": "aot_eager"})
        with torch.no_grad():
            compiled(*inputs_for(7))
        report, = fusion_pass.reports()[before:]
        assert len(report.fused) == fused, report
        if not fused:
            miss = report.near_misses[0]
            if SINCE_2_15 and "not for others" in miss.reason:
                continue
            assert "makes inputs of Python floats" in miss.reason, report
            assert "specialize_float" in advice(miss)
