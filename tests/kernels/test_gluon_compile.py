# SPDX-License-Identifier: Apache-2.0
"""Compiles the Hopper attention for sm_90a without a GPU and reads what ptxas says about it.

A spilled accumulator or a serialised wgmma costs a factor of two and no test of results notices, so these are the
kernel's regression tests for speed: bytes spilled, warnings C75xx (wgmma serialised or a wait injected), shared memory.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SHARED_LIMIT = 232_448  # bytes a CTA can have on sm_90
ROOT = Path(__file__).resolve().parents[2]
POINTERS = {"index0": "*i32", "index1": "*i32", "length0": "*i32", "length1": "*i32", "lse": "*fp32", "sink": "*fp32"}
BASE = {
    "HEADS": 128,
    "PER_GROUP": 8,
    "HALF": 32,
    "FORM": 0,
    "POOLS": 2,
    "HAS_LENGTH0": False,
    "HAS_LENGTH1": False,
    "HAS_BIAS": False,
    "HAS_SINK": True,
    "BATCHED_KV": False,
    "BLOCK": 128,
    "POWER_OF_TWO": True,
    "PACKED": False,
    "BATCHED": False,
    "ROPE_SHARED": False,
}
# name: (epilogue, constants, pointer types, bytes of spill stores allowed)
VARIANTS = {
    "plain, one pool": ("plain", {"POOLS": 1}, {}, 0),
    "rope, two pools": ("rope", {}, {}, 0),
    "quant": ("quant", {}, {"out": "*fp8e4nv", "scales": "*fp32"}, 32),
    "quant, raw scales": ("quant", {"POWER_OF_TWO": False}, {"out": "*fp8e4nv", "scales": "*fp32"}, 32),
    "quant, packed": ("quant", {"PACKED": True}, {"out": "*fp8e4nv", "scales": "*i8"}, 32),
    "quant, blocks of 32": ("quant", {"BLOCK": 32}, {"out": "*fp8e4nv", "scales": "*fp32"}, 32),
    "quant, 16 heads, lengths": (
        "quant",
        {"HEADS": 16, "HAS_LENGTH0": True, "HAS_LENGTH1": True},
        {"out": "*fp8e4nv", "scales": "*fp32"},
        96,
    ),
    "partial, fp32": ("partial", {"HAS_SINK": False}, {"out": "*fp32"}, 0),
    "partial, bf16": ("partial", {"HAS_SINK": False}, {}, 0),
    "dense mask": ("rope", {"POOLS": 1, "HAS_LENGTH0": True, "HAS_BIAS": True, "HEADS": 64}, {}, 96),
    "causal, window": ("rope", {"POOLS": 1, "FORM": 1, "HEADS": 64, "BATCHED_KV": True}, {}, 96),
}


FAST = ("quant", "dense mask")


def compile_variant(name: str) -> str:
    """ptxas' report of one specialisation, compiled with the types and constants that the launcher would pass."""
    import triton
    from fusion_pass.kernels.gluon import attention, attention_kernel
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    epilogue, constants, pointers, _ = VARIANTS[name]
    kernel = attention_kernel.attention_kernel
    constants = {**BASE, **attention.TUNING[epilogue], "EPILOGUE": attention.KINDS[epilogue], **constants}
    types = {**POINTERS, **pointers}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in attention_kernel.RUNTIME_INTEGERS:
            signature[argument] = "fp32" if argument in ("scale", "floor") else "i32"
        else:
            signature[argument] = types.get(argument, "*bf16")
    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if t.startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [ptxas, "-v", "-arch=sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return f"{log}\nshared memory {compiled.metadata.shared} bytes"


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_compiles_without_spills_or_serialised_wgmma(name):
    triton = pytest.importorskip("triton")
    if triton.__version__.split(".")[:2] != ["3", "6"]:
        pytest.skip("the Gluon kernels are gated to triton 3.6")
    # a process of its own: this one may have Triton's interpreter switched on
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, name]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    log = run.stdout
    assert int(re.search(r"shared memory (\d+)", log).group(1)) <= SHARED_LIMIT, log
    assert not re.search(r"C75\d\d", log), log
    assert "serializ" not in log.lower(), log
    assert int(re.search(r"(\d+) bytes spill stores", log).group(1)) <= VARIANTS[name][3], log


if __name__ == "__main__":
    print(compile_variant(sys.argv[1]))
