"""Run every op's kernels at small sizes under NVIDIA's compute-sanitizer.

    python tools/sanitize.py                         memcheck of all kernels, racecheck of the portable ones
    python tools/sanitize.py --tool memcheck --kernels hopper

memcheck finds reads and writes outside of allocations (every tensor is one: PyTorch's caching is off), racecheck
hazards in shared memory. One line per run: the number of errors, or "not run" with the reason where the tool or the
machine refuses (it does on some virtual machines); exit status 1 only for errors found. The Hopper kernels are not
raced: they synchronise with mbarriers, asynchronous copies and tensor-core reads, which the tool does not follow.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = (("memcheck", "portable"), ("memcheck", "hopper"), ("racecheck", "portable"))
ERROR_STATUS = 99


def work(kernels: str) -> None:
    """Every op once per form of its arguments, 5 tokens, on this GPU."""
    sys.path[:0] = [str(ROOT / "tests" / "kernels")]
    import torch
    from fusion_pass.kernels.ops import SPECS, explain
    from op_cases import Maker, every_op

    if kernels == "portable":
        from fusion_pass.kernels.gluon import bgemm, deepgemm, gate

        for module in (gate, bgemm, deepgemm):
            module.hopper_reason = lambda device: "the portable kernels are being checked"
    ran = set()
    cases = every_op(Maker("cuda", torch.bfloat16)) + _wide(Maker("cuda", torch.bfloat16))
    for name, args, more in cases:
        plain = {key: value for key, value in more.items() if key not in SPECS[name].modes}
        launcher, reasons = explain(name, SPECS[name].complete(args, plain))
        if launcher is None:
            print(f"{name}: torch reference, {reasons}")
            continue
        if (launcher.name == "triton") != (kernels == "portable"):
            continue
        getattr(torch.ops.fusion_pass, name)(*args, **more)
        torch.cuda.synchronize()
        ran.add(f"{name} ({launcher.name})")
    print(f"ran {len(ran)}: {', '.join(sorted(ran))}")


def _wide(m) -> list:
    """512 channels: two pools with lengths, a mask, causal with a window, an odd number of tokens for the product."""
    q, kv, indices, sink = m.gathered(5, 16, 512, 300, 130)
    pools = dict(zip(("lengths", "extra_kv", "extra_indices", "extra_lengths"), m.second_pool(5, 512, 90, 70)))
    dense, rope = m.dense(1, 5, 16, 512, 140, mask="bool"), m.rope(5)
    wide = tuple(table[None] for table in rope)
    return [
        ("attention_gathered_rope_quant", (q, kv, indices, sink, *rope, 0.05, 2), pools),
        ("attention_gathered", (q, kv, indices, None, 0.05), {}),
        ("attention_rope", (*dense, *wide, 0.05, 2), {}),
        ("attention_rope_quant", (dense[0], dense[1], None, dense[3], *wide, 0.05, 2), {"causal": True, "window": 37}),
        ("fp8_bgemm", m.bgemm(2, 197, 256, 1024), {}),
        ("fp8_bgemm", m.bgemm(2, 3, 256, 1024), {"batch_invariant": True}),
    ]


def sanitized(tool: str, kernels: str, seconds: float) -> tuple[str, bool]:
    """(a line about one run, whether it found errors)."""
    program = shutil.which("compute-sanitizer")
    where = f"{tool}, {kernels} kernels"
    if program is None:
        return f"{where}: not run: compute-sanitizer is not installed", False
    command = [program, "--tool", tool, "--error-exitcode", str(ERROR_STATUS), "--print-limit", "5"]
    command += [sys.executable, __file__, "--work", kernels]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{where}: not run: no result within {seconds:.0f} s", False
    output = done.stdout + done.stderr
    ran = re.search(r"^ran .*$", output, re.M)
    summary = re.search(r"(ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", output)
    if summary is None or ran is None:
        return f"{where}: not run: {' / '.join(output.strip().splitlines()[-3:])[-400:]}", False
    if int(summary[2]):
        return f"{where}: {summary[2]} errors\n{output[:4000]}", True
    return f"{where}: 0 errors; {ran[0]}", False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=["memcheck", "racecheck"])
    parser.add_argument("--kernels", choices=["portable", "hopper"])
    parser.add_argument("--seconds", type=float, default=600, help="time limit of one run")
    parser.add_argument("--work", choices=["portable", "hopper"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return 0
    failed = False
    for tool, kernels in RUNS:
        if args.tool in (None, tool) and args.kernels in (None, kernels):
            line, found = sanitized(tool, kernels, args.seconds)
            print(line, flush=True)
            failed |= found
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
