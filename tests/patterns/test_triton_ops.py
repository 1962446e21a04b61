"""A declared op that is a triton_op, as transformers' kernels from the hub are: AOTAutograd would take it apart.

In a process of its own: the kernel must not be one of Triton's interpreter, which other tests switch on.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]

PROGRAM = '''
import dataclasses, sys
import torch, triton, triton.language as tl
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import triton_op, wrap_triton
import fusion_pass
from fusion_pass import triton_ops
from fusion_pass.backend import run_boxed
from fusion_pass.patterns import opaque
from o_path import Path
from test_opaque_libraries import grouped_path

@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton_op("hub_kernels::product", mutates_args=())
def product(A: torch.Tensor, B: torch.Tensor, Bs: torch.Tensor, offsets: torch.Tensor, tokens_per_expert: torch.Tensor,
            block_size: list[int]) -> torch.Tensor:
    out = A.new_empty(A.shape[0], B.shape[1])
    wrap_triton(kernel)[(1,)](A, out, out.numel(), BLOCK=128)
    return out

row, = (r for r in opaque.ROWS if r.name == "finegrained_fp8::matmul_grouped")
opaque.add(dataclasses.replace(row, name="hub_kernels::product"))
fn, args = grouped_path(Path(), product)
with torch.no_grad():
    report = fusion_pass.explain(fn)(*args)
assert [c.roles for c in report.fused] == [("inverse_rope", "fp8_quant", "bgemm")], report

# A call in no chain becomes what it would have been without the pass.
seen = []
def look(gm, inputs):
    def compiler(aot_gm, _):
        seen.append([str(n.target) for n in aot_gm.graph.nodes if n.op == "call_function"])
        triton_ops.take_apart(aot_gm)
        seen.append([str(n.target) for n in aot_gm.graph.nodes if n.op == "call_function"])
        aot_gm.graph.lint()
        return run_boxed(aot_gm)
    with triton_ops.kept_whole(gm, inputs):
        return aot_autograd(fw_compiler=compiler, inference_compiler=compiler)(gm, inputs)

def alone(x, w, s, offsets, per_expert):
    return product(x, w, s, offsets, per_expert, [128, 128]) * 2

mode = FakeTensorMode()
with mode:
    inputs = (torch.empty(10, 2048, dtype=torch.bfloat16), torch.empty(2, 128, 2048, dtype=torch.float8_e4m3fn),
              torch.empty(2, 1, 16), torch.empty(2, dtype=torch.int32), torch.empty(2, dtype=torch.int32))
    with torch.no_grad():
        torch.compile(alone, backend=look, fullgraph=True)(*inputs)
whole, apart = seen
assert any("hub_kernels.product" in t for t in whole), whole
assert not any("hub_kernels" in t for t in apart) and any("triton_kernel_wrapper" in t for t in apart), apart
print("done")
'''


def test_declared_triton_op(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True,
                          cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
