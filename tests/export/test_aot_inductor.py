"""torch.export -> rewrite -> AOTInductor: the package runs and gives eager's numbers."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fusion_pass.kernels.ops import SPECS

import fusion_pass
from fusion_pass import Config, compat
from fusion_pass.models import FP8GroupedLinear

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "kernels")]
import op_cases  # noqa: E402
import plain_attention  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")


class InFP8(plain_attention.OutputPath):
    """The layer with the FP8 form of its projection."""

    def quantise(self):
        groups, rank, width = self.wo_a.shape
        self.linear = FP8GroupedLinear.from_linear(self.wo_a.reshape(groups * rank, width), groups, "ue8m0")
        return self

    def project(self, o):
        return self.linear(o.reshape(*o.shape[:2], self.groups, -1)).flatten(-2)


def layer(kind, dtype=torch.float32):
    model, _ = plain_attention.example(kind)
    return (model.quantise() if kind is InFP8 else model).to(dtype)


def operands(tokens, seed=0, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    q, kv = torch.randn(1, tokens, 8, 512, generator=gen), torch.randn(1, tokens, 512, generator=gen)
    angles = torch.randn(tokens, 32, generator=gen)
    return q.to(dtype), kv.to(dtype), angles.cos(), angles.sin()


def packaged(model, args, folder, dynamic_shapes=None):
    program = torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
    report = fusion_pass.rewrite(program, Config(strict=True))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return torch._inductor.aoti_load_package(path), report


def test_symbolic_tokens(tmp_path):
    """The FP8 chain: an op with two results, one of them E4M3, and one with a dtype among its arguments."""
    model = layer(InFP8, torch.bfloat16)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = ({1: tokens}, {1: tokens}, {0: tokens}, {0: tokens})
    with torch.no_grad():
        run, report = packaged(model, operands(16, dtype=torch.bfloat16), tmp_path, shapes)
        chain, = report.fused
        assert chain.roles == ("fmha", "inverse_rope", "fp8_quant", "bgemm") and "fp8_bgemm" in chain.op
        for count in (16, 23):
            args = operands(count, seed=count, dtype=torch.bfloat16)
            found, wanted = run(*args).float(), model(*args).float()
            # Roundings to bf16 in the source; codes on a rounding border may fall to either side.
            error = float((found - wanted).norm() / wanted.norm())
            print(f"{count} tokens: {error:.1e}")
            assert error < 3e-2


@pytest.mark.slow
def test_static_tokens(tmp_path):
    model, args = layer(plain_attention.OutputPath), operands(16)
    with torch.no_grad():
        run, report = packaged(model, args, tmp_path)
        assert [chain.roles for chain in report.fused] == [("fmha", "inverse_rope", "bgemm")]
        torch.testing.assert_close(run(*args), model(*args), rtol=1e-4, atol=1e-5)


    # Where nothing has registered the ops, loading says which one is missing.
    script = (f"import torch; run = torch._inductor.aoti_load_package({str(tmp_path / 'model.pt2')!r}); "
              "run(*(torch.zeros(s) for s in ((1, 16, 8, 512), (1, 16, 512), (16, 32), (16, 32))))")
    bare = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert bare.returncode and "fusion_pass::attention_rope" in bare.stderr
    ready = subprocess.run([sys.executable, "-c", "import fusion_pass; " + script], capture_output=True, text=True,
                           cwd=ROOT)
    assert ready.returncode == 0, ready.stderr


class Calls(torch.nn.Module):
    """Calls of ops: their tensors are inputs, everything else is written into the graph."""

    def __init__(self, calls):
        super().__init__()
        self.calls = [(name, *torch.utils._pytree.tree_flatten((args, kwargs))) for name, args, kwargs in calls]

    def tensors(self):
        return [leaf for _, leaves, _ in self.calls for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors):
        tensors = iter(tensors)
        results = []
        for name, leaves, spec in self.calls:
            given = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = torch.utils._pytree.tree_unflatten(given, spec)
            result = getattr(torch.ops.fusion_pass, name)(*args, **kwargs)
            results += [result] if isinstance(result, torch.Tensor) else list(result)
        return results


def every_call(without=None):
    """A module that calls every op, and its inputs; ``without`` a dtype among them."""
    calls = [call for call in op_cases.every_op(op_cases.Maker("cpu"))
             if not any(isinstance(a, torch.Tensor) and a.dtype == without for a in call[1])]
    module = Calls(calls)
    tensors = tuple(module.tensors())
    # Two calls may share an operand; export takes it once.
    return module, tuple(t.clone() for t in tensors)


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a.float(), b.float(), equal_nan=True)


def test_every_op_is_saved_and_loaded():
    from torch._export.serde import serialize

    e8m0 = torch.float8_e8m0fnu             # torch 2.11 cannot save tensors of it
    module, tensors = every_call(None if e8m0 in serialize._TORCH_TO_SERIALIZE_DTYPE else e8m0)
    with torch.no_grad():
        program = torch.export.export(module, tensors)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        assert_same(torch.export.load(file).module()(*tensors), module(*tensors))


@pytest.mark.slow
def test_every_op_is_called_by_aot_inductor(tmp_path):
    # torch's C++ code has no name for E8M0 tensors: see test_scales_that_cannot_be_packaged.
    module, tensors = every_call(without=torch.float8_e8m0fnu)
    assert len({name for name, *_ in module.calls}) == len(SPECS)
    with torch.no_grad():
        program = torch.export.export(module, tensors)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        assert_same(torch._inductor.aoti_load_package(path)(*tensors), module(*tensors))


def test_scales_that_cannot_be_packaged():
    model, args = layer(InFP8), operands(16)
    model.linear.weight_scale = model.linear.weight_scale.to(torch.float8_e8m0fnu)
    model.linear._dequantize_weight = lambda: _dequantised(model.linear)
    with torch.no_grad():
        report = fusion_pass.rewrite(torch.export.export(model, args), Config(strict=True))
    assert report.fused[0].op.endswith("fp8_bgemm"), report
    supported = torch.float8_e8m0fnu in compat.packaged_dtypes()
    assert any("view(torch.uint8)" in note for note in report.notes) != supported


def _dequantised(linear):
    groups, rows, width = linear.weight.shape
    blocks = linear.weight.float().reshape(groups, rows // 128, 128, width // 128, 128)
    return (blocks * linear.weight_scale.float()[:, :, None, :, None]).reshape(groups, rows, width)


def test_validation_says_that_it_stays_behind():
    model, args = layer(plain_attention.OutputPath), operands(16)
    with torch.no_grad():
        report = fusion_pass.rewrite(torch.export.export(model, args), Config(verify="first"))
    assert report.fused and any("verify='off'" in note for note in report.notes)


def test_ops_are_called_through_the_dispatcher():
    """AOTInductor knows our ops by their schemas alone: an out-variant that Inductor may call itself would become a
    call of a C function that is not there."""
    for name in SPECS:
        out = getattr(torch.ops.fusion_pass, name).out
        assert getattr(torch.Tag, "out", None) not in out.tags
