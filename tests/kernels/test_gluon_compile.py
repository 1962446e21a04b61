# SPDX-License-Identifier: Apache-2.0
"""Compiles the Hopper kernels for sm_90a without a GPU and reads what ptxas and the machine code say.

A spilled accumulator or a serialised wgmma costs a factor of two and no test of results notices, so these are the
kernels' regression tests for speed: no local memory in an inner loop, no warning C75xx (wgmma serialised, or a wait
injected), shared memory within the limit.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fusion_pass.kernels.tuning.bgemm import Form

SHARED_LIMIT = 232_448  # bytes a CTA can have on sm_90
ROOT = Path(__file__).resolve().parents[2]
POINTERS = {"index0": "*i32", "index1": "*i32", "length0": "*i32", "length1": "*i32", "lse": "*fp32", "sink": "*fp32"}
POINTERS |= {"share_lse": "*fp32"}
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
    "STRIDE0": 512,
    "STRIDE1": 512,
    "PAGED": False,
    "PAIRED": False,
    "AHEAD": False,
}
QUANT = {"out": "*fp8e4nv", "scales": "*fp32"}
PAGES = {"PAGED": True, "AHEAD": True, "STRIDE0": 64, "STRIDE1": 64}
BYTES = {"kv0": "*u8", "kv1": "*u8"}
# name: (epilogue, constants, pointer types)
VARIANTS = {
    "plain, one pool": ("plain", {"POOLS": 1}, {}),
    "rope, two pools": ("rope", {}, {}),
    "quant": ("quant", {}, QUANT),
    "quant, raw scales": ("quant", {"POWER_OF_TWO": False}, QUANT),
    "quant, packed": ("quant", {"PACKED": True}, {"out": "*fp8e4nv", "scales": "*i8"}),
    "quant, blocks of 32": ("quant", {"BLOCK": 32}, QUANT),
    "quant, 16 heads, lengths": ("quant", {"HEADS": 16, "HAS_LENGTH0": True, "HAS_LENGTH1": True}, QUANT),
    "partial, fp32": ("partial", {"HAS_SINK": False}, {"out": "*fp32"}),
    "partial, bf16": ("partial", {"HAS_SINK": False}, {}),
    "dense mask": ("rope", {"POOLS": 1, "HAS_LENGTH0": True, "HAS_BIAS": True, "HEADS": 64}, {}),
    "pages, quant": ("quant", PAGES, {**QUANT, **BYTES}),
    "pages, partial, one pool": ("partial", {**PAGES, "HAS_SINK": False, "POOLS": 1}, BYTES),
    "pages of 64 and 2 rows, lengths": (
        "rope",
        {**PAGES, "AHEAD": False, "STRIDE1": 2, "HAS_LENGTH0": True, "HAS_LENGTH1": True, "HEADS": 64},
        {**BYTES, "index0": "*i64", "index1": "*i64"},
    ),
    "quant, paired": ("quant", {"PAIRED": True}, QUANT),
    "plain, paired": ("plain", {"PAIRED": True, "HEADS": 64}, {}),
    "dense mask, packed, paired": (
        "quant",
        {"PAIRED": True, "POOLS": 1, "HAS_BIAS": True, "PACKED": True},
        {"out": "*fp8e4nv", "scales": "*i8"},
    ),
    "causal, window": ("rope", {"POOLS": 1, "FORM": 1, "HEADS": 64, "BATCHED_KV": True, "BATCHED": True}, {}),
}
# name: (form, constants)
BGEMM_VARIANTS = {
    "bgemm, 16 tokens": (Form(16, 128, 4, 2, swap=True, prefetch=512), {}),
    "bgemm, 16 tokens, exponent scales": (
        Form(16, 128, 4, 2, swap=True, prefetch=512),
        {"PACKED_X": True, "BYTES_W": True},
    ),
    "bgemm, 32 tokens": (Form(32, 128, 3, 2, swap=True, prefetch=512), {}),
    "bgemm, 64 tokens": (Form(64, 128, 3, 2), {}),
    "bgemm, 64 tokens, 64 rows": (Form(64, 64, 4, 2), {}),
    "bgemm, 128 tokens": (Form(128, 128, 5, 1), {}),
    "bgemm, 256 tokens": (Form(256, 128, 4, 1), {}),
    "bgemm, overlapped": (Form(128, 128, 5, 1, overlapped=True), {}),
    "bgemm, overlapped, exponent scales": (
        Form(128, 128, 5, 1, overlapped=True),
        {"PACKED_X": True, "BYTES_W": True, "UNROLL": 4},
    ),
    "bgemm, exponent scales": (Form(256, 128, 4, 1), {"PACKED_X": True, "BYTES_W": True}),
}
FAST = ("quant", "quant, paired", "dense mask", "pages, quant", "bgemm, 16 tokens", "bgemm, overlapped")


def attention_source(name: str):
    """(kernel, types, constants) as the attention's launcher would pass them."""
    from fusion_pass.kernels.gluon import attention, attention_kernel

    epilogue, constants, pointers = VARIANTS[name]
    kernel = attention_kernel.attention_kernel
    tuning = {**attention.TUNING, **(attention.PAGED_TUNING if constants.get("PAGED") else {})}
    constants = {**BASE, **tuning, "EPILOGUE": attention.KINDS[epilogue], **constants}
    types = {**POINTERS, **pointers}
    for argument in kernel.arg_names:
        if argument in attention_kernel.RUNTIME_INTEGERS:
            types[argument] = "fp32" if argument in ("scale", "floor") else "i32"
        elif argument not in constants:
            types.setdefault(argument, "*u8" if argument == "warm" else "*bf16")
    return kernel, types, constants


def bgemm_source(name: str):
    """(kernel, types, constants) as the BGEMM's launcher would pass them."""
    from fusion_pass.kernels.gluon import bgemm, bgemm_kernel, bgemm_overlapped
    from triton.experimental.gluon.language import NVMMASharedLayout

    form, changed = BGEMM_VARIANTS[name]
    constants = {
        "GROUPS": 16,
        "ROW_TILES": 1024 // form.weight_rows,
        "K_BLOCKS": 32,
        "TOKENS": form.tokens,
        "WEIGHT_ROWS": form.weight_rows,
        "STAGES": form.stages,
        "BLOCKS": form.blocks,
        "SWAP": form.swap,
        "PACKED_X": False,
        "BYTES_W": False,
        "PDL": True,
        "LET_IN": True,
        "PREFETCH": form.prefetch,
        **(bgemm.SWAP_TUNING if form.swap else bgemm.TUNING),
        **changed,
    }
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    scale_type = "i32" if constants["PACKED_X"] else "fp32"
    types = {
        "x_rows": f"tensordesc<fp8e4nv[{form.tokens}, 128],{layout!r}>",
        "w_rows": f"tensordesc<fp8e4nv[{form.weight_rows}, 128],{layout!r}>",
        "scale_rows": f"tensordesc<{scale_type}[{max(form.tokens, 32)}],{flat!r}>",
        "weight": "*fp8e4nv",
        "w_scales": "*u8" if constants["BYTES_W"] else "*fp32",
        "out": "*bf16",
        "tiles_count": "i32",
        "tokens": "i32",
        "blocks_t": "i32",
        "padded": "i32",
        "early": "i32",
    }
    if form.overlapped:
        kernel = bgemm_overlapped.overlapped_bgemm_kernel
        stored = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        types["out"] = f"tensordesc<bf16[64, 64],{stored!r}>"
        constants = {"UNROLL": 8} | {n: value for n, value in constants.items() if n in kernel.arg_names}
        return kernel, types, constants
    return bgemm_kernel.bgemm_kernel, types, constants


def compile_variant(name: str) -> dict:
    """Shared memory, ptxas' report and machine code of one specialisation."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, types, constants = (bgemm_source if name in BGEMM_VARIANTS else attention_source)(name)
    names = kernel.arg_names
    options = {"num_warps": 4} | {n: constants.pop(n) for n in ("maxnreg",) if n in constants}
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if t.startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        command = [tools / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [tools / "cuobjdump", "-sass", cubin]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"shared": compiled.metadata.shared, "log": log, "sass": sass}


def inner_loops(sass: str) -> list[list[str]]:
    """Instructions of the innermost loops that hold matrix products (GMMA) or asynchronous copies (LDGSTS, TMA)."""
    code = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,6})\*/\s+([^;]+);", sass)]
    jumps = ((a, re.match(r"@!?U?P\d+ BRA 0x([0-9a-f]+)", text)) for a, text in code)
    spans = [(int(m[1], 16), a) for a, m in jumps if m and int(m[1], 16) < a]
    bodies = {span: [text for a, text in code if span[0] <= a <= span[1]] for span in spans}
    busy = [span for span, body in bodies.items() if any("GMMA" in t or "LDGSTS" in t or "UTMALDG" in t for t in body)]
    inner = [s for s in busy if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in busy)]
    return [bodies[span] for span in inner]


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in (*VARIANTS, *BGEMM_VARIANTS)]
)
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
    result = json.loads(run.stdout)
    assert result["shared"] <= SHARED_LIMIT
    assert not re.search(r"C75\d\d", result["log"]), result["log"]
    assert "serializ" not in result["log"].lower(), result["log"]
    if name.startswith(("bgemm, 16", "bgemm, 32")):
        # of 168 that 384 threads may have: the kernel before keeps the rest while this one starts beside it
        assert int(re.search(r"Used (\d+) registers", result["log"])[1]) <= 80
    loops = inner_loops(result["sass"])
    assert len(loops) >= 2, "the consumers' loops were not found in the machine code"
    for body in loops:
        spills = [text for text in body if re.search(r"\b(LDL|STL)", text)]
        # a producer may keep some words of a job in local memory, the consumers nothing, or two words where a second
        # producer leaves them fewer registers
        allowed = 2 * ("pages" in name) if any("GMMA" in text for text in body) else 8
        assert len(spills) <= allowed, (spills, result["log"])


if __name__ == "__main__":
    print(json.dumps(compile_variant(sys.argv[1])))
