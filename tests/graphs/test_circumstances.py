# SPDX-License-Identifier: Apache-2.0
"""A real chain in other people's circumstances: fake and meta devices, autocast, tensor subclasses, functorch, debug
switches and torch's minifier. What is fused must give the source's numbers; what is refused says why.
"""

import os
import subprocess
import sys
from pathlib import Path

import chains
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_pass

ROOT = Path(__file__).parents[2]
INPUTS = chains.inputs(dtype=torch.float32)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compiled(function=chains.chain, inner="aot_eager"):
    return torch.compile(function, backend="fusion_pass", options={"inner": inner})


def fused():
    return [chain.op for chain in fusion_pass.reports()[-1].fused]


@torch.no_grad()
def test_meta_device():
    out = compiled()(*[a.to("meta") for a in INPUTS])
    assert out.device.type == "meta" and out.shape == chains.chain(*INPUTS).shape
    assert fused() == ["fusion_pass.attention_rope"]


@torch.no_grad()
def test_fake_tensors():
    with FakeTensorMode() as mode:
        out = compiled()(*[mode.from_tensor(a) for a in INPUTS])
    assert isinstance(out, torch._subclasses.FakeTensor) and fused() == ["fusion_pass.attention_rope"]


@torch.no_grad()
def test_explain_on_the_meta_device():
    assert len(fusion_pass.explain(chains.chain)(*[a.to("meta") for a in INPUTS]).fused) == 1


@torch.no_grad()
@pytest.mark.parametrize("outside", [True, False])
def test_autocast(outside):
    """Around the call and inside of it: matmuls in bf16, as the graph then says."""
    def inside(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return chains.chain(*args)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        out = compiled(chains.chain if outside else inside)(*INPUTS)
    want = inside(*INPUTS)
    assert out.dtype == want.dtype and fused() == ["fusion_pass.attention_rope"]
    torch.testing.assert_close(out.float(), want.float(), atol=2e-2, rtol=2e-2)


class Plain(torch.Tensor):
    """A subclass that Dynamo traces through and AOTAutograd does not take apart."""


@torch.no_grad()
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_subclasses_are_refused_with_the_reason(inner):
    args = [INPUTS[0].as_subclass(Plain), *INPUTS[1:]]
    try:
        compiled(inner=inner)(*args)
    except TypeError as error:  # torch's own backends do not run such a graph either
        assert "dispatch" in str(error)
    (note,) = fusion_pass.reports()[-1].notes
    assert "Plain: operators on a tensor subclass" in note and not fused()


@torch.no_grad()
def test_a_traced_subclass_is_refused_with_the_reason():
    gm = chains.raw(chains.chain, INPUTS)
    placeholder = gm.graph.find_nodes(op="placeholder")[0]
    placeholder.meta["val"] = INPUTS[0].as_subclass(Plain)
    report = fusion_pass.rewrite(gm)
    assert "tensor subclass" in report.notes[0] and not report.fused


@torch.no_grad()
def test_wrapper_subclasses_are_fused_inside():
    """AOTAutograd hands over one graph of the tensors inside: two of them, two chains."""
    from torch.testing._internal.two_tensor import TwoTensor

    out = compiled()(*[TwoTensor(a, a * 1.25) for a in INPUTS])
    assert fused() == ["fusion_pass.attention_rope"] * 2
    torch.testing.assert_close(out.a, chains.chain(*INPUTS), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.b, chains.chain(*[a * 1.25 for a in INPUTS]), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_vmap_inside():
    q = torch.stack([INPUTS[0], INPUTS[0] + 1])
    out = compiled(lambda q: torch.vmap(lambda x: chains.chain(x, *INPUTS[1:]))(q))(q)
    want = torch.stack([chains.chain(x, *INPUTS[1:]) for x in q])
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)


def test_training_graphs_are_refused():
    q = INPUTS[0].clone().requires_grad_()
    out = compiled()(q, *INPUTS[1:])
    out.sum().backward()
    assert not fused() and "no backward" in fusion_pass.reports()[-1].notes[0] and q.grad.abs().sum() > 0


PROGRAM = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
import chains, fusion_pass, torch
args = chains.inputs(dtype=torch.float32)
with torch.no_grad():
    out = torch.compile(chains.chain, backend="fusion_pass")(*args)
    torch.testing.assert_close(out, chains.chain(*args), atol=1e-5, rtol=1e-4)
print([chain.op for chain in fusion_pass.reports()[-1].fused])
"""


@pytest.mark.slow
@pytest.mark.parametrize("switches", [
    {"TORCH_COMPILE_DEBUG": "1"}, {"TORCHDYNAMO_REPRO_AFTER": "aot", "TORCHDYNAMO_REPRO_LEVEL": "2"},
    {"TORCHDYNAMO_REPRO_AFTER": "aot", "TORCHDYNAMO_REPRO_LEVEL": "4"}, {"TORCHINDUCTOR_FREEZING": "1"},
    {"TORCHINDUCTOR_CPP_WRAPPER": "1"}, {"TORCH_LOGS": "+inductor,aot_graphs,post_grad_graphs"},
], ids=lambda s: "-".join(s))  # fmt: skip
def test_debug_switches(switches, tmp_path):
    code = PROGRAM.format(root=str(ROOT), here=str(Path(__file__).parent))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **switches}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "['fusion_pass.attention_rope']" in done.stdout, done.stderr[-2000:]
