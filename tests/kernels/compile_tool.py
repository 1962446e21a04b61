# SPDX-License-Identifier: Apache-2.0
"""Runs the launchers of the portable kernels for a GPU that is not there, as a script of its own process.

    compile_tool.py compile CAPABILITY ...   compile what the launchers would launch; one JSON line per kernel with
                                             ptxas' resource report
    compile_tool.py main                     only the main attention tile of sm_90, all key sources and epilogues
    compile_tool.py keys                     count the distinct specialisation keys of warm-ups and of serving
                                             T = 1 .. 300 afterwards, compiling nothing

Triton is given a driver that only names its target, and every launch becomes a warm-up, so the host code under test
chooses tiles, types and alignments exactly as on that GPU. Must not run under ``TRITON_INTERPRET``.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch
import triton
from fusion_pass.kernels import warm_up
from fusion_pass.kernels.ops import SPECS, dispatch
from fusion_pass.kernels.triton import launchers, reduce_launchers
from fusion_pass.kernels.triton.attention_launch import Keys, attend, rope_quant
from fusion_pass.kernels.tuning.attention import TILES, architecture
from op_cases import Maker
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Compute capability -> shared memory one program may use, bytes.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376, 121: 101376}
SM_COUNT = 132


class OfflineDriver:
    """The part of a Triton driver that compilation asks for; the device number is the capability."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device) -> int:
        return 0


@contextlib.contextmanager
def offline_gpu(capability: int, launched: list):
    """Launches append (kernel name, compiled kernel or None) to ``launched`` instead of running."""
    answers = {
        "device_of": lambda q: (divmod(capability, 10), SM_COUNT),
        "e4m3_is_native": lambda device: capability >= 89,
        "supports_pdl": lambda device: capability >= 90,
    }
    modules = [m for name, m in sys.modules.items() if name.startswith("fusion_pass.kernels.triton.")]
    saved = [(m, name, getattr(m, name)) for m in modules for name in answers if hasattr(m, name)]
    hopper = [m for name, m in sys.modules.items() if name.startswith("fusion_pass.kernels.gluon.")]
    answers["hopper_reason"] = lambda device: None if capability == 90 else "another architecture"
    saved += [(m, "hopper_reason", m.hopper_reason) for m in hopper if hasattr(m, "hopper_reason")]
    properties = SimpleNamespace(multi_processor_count=SM_COUNT, major=capability // 10, minor=capability % 10)
    answers["get_device_properties"] = lambda device: properties
    answers["get_device_capability"] = lambda device=None: divmod(capability, 10)
    asked = ("get_device_properties", "get_device_capability")
    saved += [(torch.cuda, name, getattr(torch.cuda, name)) for name in asked]
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched.append((self.__name__, compiled))
        return compiled

    try:
        for module, name, _ in saved:
            setattr(module, name, answers[name])
        driver.set_active(OfflineDriver(capability))
        JITFunction.run = warm_up
        yield
    finally:
        JITFunction.run = run
        for module, name, original in saved:
            setattr(module, name, original)


def resources(compiled, capability: int) -> dict:
    """What ptxas -v says about a compiled kernel, and the instructions that matter."""
    ptx = compiled.asm["ptx"]
    ptxas = get_ptxas(capability).path  # Triton's own choice: which of its two reads the PTX depends on its version
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
        "spill_bytes": int(spills.group(1)) + int(spills.group(2)),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync") + ptx.count("tcgen05.mma"),
        "copies_16_bytes": len(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x10,", ptx)),
        "serialised": "serializ" in done.stderr.lower(),
    }


def launch(op: str, *args, **kwargs) -> None:
    """The portable launcher of ``op`` into fresh outputs."""
    args = SPECS[op].complete(args, kwargs)
    SPECS[op].check(*args)
    named = {
        "attention": launchers._launch_dense,
        "attention_rope": launchers._launch_dense_rope,
        "attention_rope_quant": launchers._launch_dense_quant,
        "attention_gathered": launchers._launch_gathered,
        "attention_gathered_rope": launchers._launch_gathered_rope,
        "attention_gathered_rope_quant": launchers._launch_gathered_quant,
        "attention_partials": launchers._launch_partials,
        "fp8_bgemm": launchers._launch_bgemm,
        "inverse_rope": reduce_launchers._launch_rope,
        "inverse_rope_quant": reduce_launchers._launch_rope_quant,
        "merge_partials": reduce_launchers._launch_merge,
        "merge_partials_rope": reduce_launchers._launch_merge_rope,
        "merge_partials_rope_quant": reduce_launchers._launch_merge_rope_quant,
    }
    named[op](SPECS[op].empty(*args), *args)


def serve(op: str, *args, **kwargs) -> None:
    """``op`` as on the GPU of :func:`offline_gpu`: whichever launcher takes it first."""
    args = SPECS[op].complete(args, kwargs)
    SPECS[op].check(*args)
    launcher = next(known for known in dispatch._launchers[op] if known.refuses(*args) is None)
    launcher.launch(SPECS[op].empty(*args), *args)


PACKED = {"block": 32, "scale_rule": "ue8m0", "pack_scales": True}


def attention_launches(heads: int, tokens: int = 300, dtype=torch.bfloat16):
    """Every key source and epilogue at DeepSeek-V4's sizes; 300 tokens are not split."""
    m = Maker(dtype=dtype)
    groups = max(1, heads // 8)
    q, kv, mask, sink = m.dense(1, tokens, heads, 512, 640, mask="float")
    rope = m.rope(1, tokens)
    launch("attention", q, kv, None, sink, 0.04, True, 128)
    launch("attention_rope", q, kv, mask, sink, *rope, 0.04, groups)
    launch("attention_rope_quant", q, kv, mask > 0, sink, *rope, 0.04, groups)
    q, kv, indices, sink = m.gathered(tokens, heads, 512, 4096, 128)
    pools = (None, m.normal(4096, 512), m.integers(0, 4096, (tokens, 1024)), None)
    lengths = m.integers(1, 128, (tokens,))
    rope = m.rope(tokens)
    more = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), pools))
    launch("attention_gathered_rope_quant", q, kv, indices, sink, *rope, 0.04, groups, **more)
    launch("attention_gathered_rope_quant", q, kv, indices, sink, *rope, 0.04, groups, **PACKED, lengths=lengths)
    launch("attention_gathered_rope", q, kv, indices, sink, *rope, 0.04, groups)
    launch("attention_partials", q, kv, indices, 0.04, 8, *pools)


def everything(capability: int) -> None:
    for heads in (8, 32, 128):
        attention_launches(heads)
    attention_launches(8, dtype=torch.float32)
    m = Maker(dtype=torch.bfloat16)
    q, kv, indices, sink = m.gathered(300, 128, 512, 4096, 128)
    launch("attention_gathered", q, kv, indices.long(), sink, 0.04, None, kv, indices)
    for tokens in (1, 12, 30, 60, 300, 1000):
        launch("fp8_bgemm", *m.bgemm(16, tokens, 1024, 512))
        launch("fp8_bgemm", *m.bgemm(8, tokens, 1024, 512, 32, 32, True, "e8m0"), 32, 32)
    for tokens in (1, 64, 1024):
        o, rope = m.normal(tokens, 128, 512), m.rope(tokens)
        launch("inverse_rope", o, *rope, 16)
        launch("inverse_rope_quant", o, *rope, 16)
        launch("inverse_rope_quant", o, *rope, 16, **PACKED)
    partials, lse = m.partials(18, 2, 128, 512)
    sink, rope = m.normal(128, dtype=torch.float32), m.rope(2)
    launch("merge_partials", partials, lse, None, sink, return_stats=True)
    launch("merge_partials_rope", partials, lse, None, sink, *rope, 16, out_dtype=torch.bfloat16)
    launch("merge_partials_rope_quant", partials, lse, None, sink, *rope, 16)


def main_tile() -> None:
    """The 64 x 64 tile of sm_90 with every key source and epilogue, merged partials aside."""
    attention_launches(128)
    m = Maker(dtype=torch.bfloat16)
    q, kv, indices, sink = m.gathered(300, 128, 512, 4096, 1152)
    rope = rope_quant(*m.rope(1, 300), 16, 128, "ue8m0", 1e-10, False)
    outs = torch.empty(16, 300, 4096, dtype=torch.float8_e4m3fn), torch.empty(16, 32, 300)
    tile = TILES[architecture((9, 0))][(2, 64)]
    attend(outs, q[None], Keys(kv[None], indices), None, sink, 0.04, rope, tile, 1)


def report(capability: int, work) -> None:
    launched, seen = [], set()
    with offline_gpu(capability, launched):
        work()
    for name, compiled in launched:
        if compiled is None or compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        print(json.dumps({"capability": capability, "kernel": name, **resources(compiled, capability)}), flush=True)


CHAINS = {
    "pro, gathered, FP8": {"heads": 128, "groups": 16, "kv": ("gathered",), "quant": "ue8m0"},
    "pro, FP8 pages": {"heads": 128, "groups": 16, "kv": ("paged_fp8",), "quant": "fp32", "lengths": (True,)},
    "flash, dense": {"heads": 64, "groups": 8, "kv": ("dense",), "masks": ("none", "bool", "float")},
    "flash, merges and epilogue": {"heads": 64, "groups": 8, "kv": ("partials", "opaque"), "partials": (2, 18, 64)},
}
SERVED = 300  # tokens


def count_keys() -> None:
    """Specialisation keys per kernel: of the warm-up of some chains, and those that serving every token count up to
    SERVED then adds (with other numbers of keys than the warm-up's). Nothing is compiled."""
    keys: dict[str, set] = {}

    def record(*, key, fn, **_):
        keys.setdefault(fn.name.rpartition(".")[2], set()).add(key)
        return True  # already done: skip the compilation

    triton.knobs.runtime.jit_cache_hook = record
    dispatch.load_providers()
    cpu = torch.device("cpu")
    for name, sizes in CHAINS.items():
        keys.clear()
        chain = warm_up.Chain(**sizes, max_tokens=SERVED, max_keys=2048)
        with offline_gpu(90, []):
            for op, args, more in warm_up.calls(chain, cpu, SM_COUNT):
                serve(op, *args, **more)
            warm = {kernel: len(found) for kernel, found in keys.items()}
            for tokens in range(1, SERVED + 1):
                for op, args, more in requests(chain, tokens):
                    serve(op, *args, **more)
        served = {kernel: len(found) for kernel, found in keys.items()}
        print(json.dumps({"chain": name, "warm": warm, "served": served}), flush=True)


def requests(chain, tokens: int):
    """The calls of one request of ``tokens`` tokens: a context that the warm-up did not try."""
    make = warm_up._Operands(chain, torch.device("cpu"))
    if "dense" in chain.kv:
        for keys in (tokens, tokens + 37, 1000 + tokens):
            yield from warm_up._dense(make, tokens, min(keys, chain.max_keys))
    for form in ("gathered", "paged_fp8"):
        if form in chain.kv:
            for capacity in chain.capacities:
                yield from warm_up._listed(make, tokens, capacity, form == "paged_fp8")
    if "partials" in chain.kv:
        for count in chain.partials:
            yield warm_up._merge(make, count, tokens)
    if "opaque" in chain.kv:
        args = (make.q(tokens), *make.tables(tokens), chain.groups, *chain.quantisation)
        yield f"inverse{chain.suffix}", args, {}
    if chain.quant:
        weight = make.empty(chain.groups, chain.rank, chain.width, dtype=torch.float8_e4m3fn)
        factors = make.empty(chain.groups, chain.rank // 128, chain.width // 128, dtype=torch.float32)
        yield warm_up._product(make, tokens, weight, factors)


if __name__ == "__main__":
    if sys.argv[1] == "keys":
        count_keys()
    elif sys.argv[1] == "main":
        report(90, main_tile)
    else:
        for capability in map(int, sys.argv[2:]):
            report(capability, lambda capability=capability: everything(capability))
