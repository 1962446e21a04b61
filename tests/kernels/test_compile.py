# SPDX-License-Identifier: Apache-2.0
"""Compiles the portable kernels without a GPU: registers, spills, wgmma, shared memory; and counts specialisations.

The work runs in ``compile_tool.py``, its own process, because this one may hold the kernels in interpreter form.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from compile_tool import SHARED_MEMORY  # noqa: E402

FOLDER = Path(__file__).parent
# Register allocation belongs to the compiler: limits are asserted for the version they were established with.
ASSERTED = triton.__version__.split("+")[0] == "3.6.0"


def tool(*arguments) -> list[dict]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(FOLDER.parents[1]), str(FOLDER), *filter(None, [env.get("PYTHONPATH")])]
    command = [sys.executable, str(FOLDER / "compile_tool.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**env, "PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def show(rows) -> None:
    print(f"\ntriton {triton.__version__}")
    for row in rows:
        print("  ", *(f"{name} {value}" for name, value in row.items()))


def test_main_attention_tile():
    """64 heads x 64 keys on sm_90: tensor cores fed by 16-byte copies, nothing spilled, for every source of keys and
    every epilogue."""
    rows = tool("main")
    show(rows)
    attention = [row for row in rows if row["kernel"] == "attention_kernel"]
    assert len(attention) >= 7
    for row in attention:
        assert row["shared"] <= SHARED_MEMORY[90]
        if ASSERTED:
            assert row["spill_bytes"] == 0 and row["wgmma"] > 0 and not row["serialised"] and row["mma"] == 0
            assert row["copies_16_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", list(SHARED_MEMORY))
def test_every_kernel_compiles(capability):
    """What the launchers would launch on each GPU of the support matrix compiles and fits its shared memory."""
    rows = tool("compile", capability)
    show(rows)
    assert {row["kernel"] for row in rows} >= {
        "attention_kernel",
        "list_visible_keys",
        "bgemm_kernel",
        "_rope_quant_kernel",
        "merge_kernel",
    }
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[capability]
        if ASSERTED and row["kernel"] != "merge_kernel":
            # Known: encoding E4M3 by bits in blocks of 32 (sm_80), 64-bit indices of two pools (sm_90), ptxas' choice
            # of 80 registers for the 16-head tile (sm_100).
            assert row["spill_bytes"] <= {80: 1024, 90: 96, 100: 16}.get(capability, 0), row


def test_specialisations_are_bounded():
    """A warm-up reaches every compiled kernel that serving any number of tokens up to 300 then asks for, and they are a
    handful per kernel: none per token count, none per number of keys. Gluon kernels and merges included."""
    rows = tool("keys")
    show(rows)
    # attention: whole, split, paired, by kind of layer and of lengths or mask; product: rows of the table, three
    # kernels; merges: one per layout of the policy that the splits of this GPU reach, and per number of partials of few
    # rows. Attention decodes pages.
    limits = {"attention_kernel": 12, "bgemm_kernel": 8, "overlapped_bgemm_kernel": 2, "_rope_quant_kernel": 4}
    limits |= {"list_visible_keys": 6, "merge_kernel": 40, "_merge_rows_kernel": 16}
    assert {kernel for row in rows for kernel in row["warm"]} == set(limits)
    for row in rows:
        assert row["served"] == row["warm"], row
        for kernel, count in row["warm"].items():
            assert 1 <= count <= limits[kernel], row
