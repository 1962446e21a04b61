# SPDX-License-Identifier: Apache-2.0
"""Compiles the Hopper attention for sm_90a without a GPU and reads what ptxas says about it.

A spilled accumulator or a serialised wgmma costs a factor of two and no test of results notices, so these are the
kernel's regression tests for speed: bytes spilled, warnings C75xx (wgmma serialised or a wait injected), shared memory.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.__version__.split(".")[:2] != ["3", "6"]:
    pytest.skip("the Gluon kernels are gated to triton 3.6", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from fusion_pass.kernels.gluon import attention, attention_kernel  # noqa: E402

SHARED_LIMIT = 232_448  # bytes a CTA can have on sm_90
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
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


def compile_variant(epilogue: str, constants: dict, pointers: dict, tmp_path: Path) -> tuple[int, int, str]:
    """(shared memory, bytes of spill stores, ptxas output) of one specialisation, launched as the launcher would."""
    kernel = attention_kernel.attention_kernel
    constants = {**BASE, **attention.TUNING[epilogue], "EPILOGUE": attention.KINDS[epilogue], **constants}
    types = {**POINTERS, **pointers}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in attention_kernel.RUNTIME_INTEGERS:
            signature[name] = "fp32" if name in ("scale", "floor") else "i32"
        else:
            signature[name] = types.get(name, "*bf16")
    names = kernel.arg_names
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if t.startswith("*")}
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs=aligned,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [PTXAS, "-v", "-arch=sm_90a", ptx, "-o", tmp_path / "kernel.cubin"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spill = re.search(r"(\d+) bytes spill stores", log)
    assert spill, log
    return compiled.metadata.shared, int(spill.group(1)), log


@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_without_spills_or_serialised_wgmma(name, tmp_path, record_property):
    epilogue, constants, pointers, allowed = VARIANTS[name]
    shared, spill, log = compile_variant(epilogue, constants, pointers, tmp_path)
    record_property("spill_bytes", spill)
    record_property("shared_bytes", shared)
    assert shared <= SHARED_LIMIT
    assert not re.search(r"C75\d\d", log), log
    assert "serializ" not in log.lower(), log
    assert spill <= allowed, log
