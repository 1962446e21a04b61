# SPDX-License-Identifier: Apache-2.0
"""Compiles a Triton kernel for a GPU that need not be there, and reads ptxas' resource report.

Runs outside the interpreter: use it from a process without ``TRITON_INTERPRET``.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PTXAS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
# GPUs of the support matrix: compute capability -> shared memory one program may use, bytes.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376, 121: 101376}


@dataclass(frozen=True)
class Resources:
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    wgmma: int
    mma: int
    async_copies: int  # 16-byte asynchronous copies to shared memory
    serialised: bool  # ptxas had to serialise wgmma (its warning C7510 and relatives)

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, spills {self.spill_stores}/{self.spill_loads} B, shared {self.shared} B, "
            f"wgmma {self.wgmma}, mma {self.mma}, "
            f"cp.async 16 B {self.async_copies}{', wgmma serialised' if self.serialised else ''}"
        )


def compile_for(kernel, capability: int, types: dict, constants: dict, aligned=(), options=None) -> Resources:
    """``types``: argument -> Triton type; ``constants``: constexpr -> value; ``aligned``: integer arguments (pointers
    always) known to be multiples of 16."""
    names = kernel.arg_names
    missing = [n for n in names if n not in types and n not in constants]
    assert not missing, f"no type or value for {missing}"
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n in types and (types[n].startswith("*") or n in aligned)
    }
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs=attributes,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options or {})
    ptx = compiled.asm["ptx"]
    return Resources(**ptxas_report(ptx, capability), shared=compiled.metadata.shared)


def ptxas_report(ptx: str, capability: int) -> dict:
    ptxas = os.path.join(PTXAS, "ptxas-blackwell" if capability >= 100 else "ptxas")
    if not os.path.exists(ptxas):
        ptxas = os.path.join(PTXAS, "ptxas")
    target = re.search(r"^\.target (\w+)", ptx, re.M).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        command = [ptxas, "-v", f"-arch={target}", path, "-o", os.path.join(folder, "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return {
        "registers": int(re.search(r"Used (\d+) registers", done.stderr).group(1)),
        "spill_stores": int(spills.group(1)),
        "spill_loads": int(spills.group(2)),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync") + ptx.count("tcgen05.mma"),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x10,", ptx)),
        "serialised": "serializ" in done.stderr.lower(),
    }
