# SPDX-License-Identifier: Apache-2.0
"""Soak: a thousand decode steps with random lengths through one CUDA graph, bit for bit the results of eager calls.

A graph is captured once, at one set of lengths; every step then brings new queries, a new row of the cache, other
index lists and lengths (none at all now and then), and is replayed. The eager call gets the same values in fresh
tensors of exactly that size. On a CPU the same steps run, fewer, without a graph: results must not depend on what the
buffers held before. ``FUSION_PASS_SOAK_RECORD`` names a file for the counts (``docs/soak.json``, from a GPU).
"""

import datetime
import json
import os
from pathlib import Path

import pytest
import torch
from op_cases import DEVICES, Maker

ops = torch.ops.fusion_pass
STEPS = {"cuda": 1000, "cpu": 12}
HEADS, GROUPS, ROWS, COLUMNS, BLOCK = 64, 8, 1024, 640, 128


class Decode:
    """Static buffers of one decode step and the calls that read them."""

    def __init__(self, form: str, tokens: int, device: torch.device, small: bool):
        self.form, self.tokens, self.device = form, tokens, device
        self.heads, self.groups = (4, 2) if small else (HEADS, GROUPS)
        self.pool, self.columns = (96, 24) if small else (4096, COLUMNS)
        self.make = m = Maker(device, torch.bfloat16, seed=tokens)
        self.sink = m.normal(self.heads, dtype=torch.float32)
        width = self.heads // self.groups * 512
        rows = 64 if small else ROWS
        self.weight = m.normal(self.groups, rows, width, dtype=torch.float32).to(torch.float8_e4m3fn)
        self.factors = torch.rand(self.groups, -(-rows // 128), width // 128, device=device) * 0.1 + 0.01
        self.cache = m.normal(self.pool, 512) if form == "gathered" else m.pages(self.pool // 16, 16)
        self.state = self.fresh(0)

    def fresh(self, step: int) -> dict[str, torch.Tensor]:
        """What changes from step to step."""
        m = self.make
        lengths = m.integers(0, self.columns + 1, (self.tokens,))
        if step % 7 == 3:
            lengths[0] = 0
        indices = m.integers(0, self.pool, (self.tokens, self.columns))
        indices = torch.where(torch.arange(self.columns, device=self.device) < lengths[:, None], indices, -1)
        cos, sin = m.rope(self.tokens)
        return {"q": m.normal(self.tokens, self.heads, 512), "indices": indices, "lengths": lengths, "cos": cos,
                "sin": sin}  # fmt: skip

    def write(self, step: int) -> None:
        """A new row in the cache, in place, as a decode step writes it."""
        if self.form == "gathered":
            self.cache[step * 37 % self.pool] = self.make.normal(512)
        else:
            self.cache[step % self.cache.shape[0]] = self.make.pages(1, 16)[0]

    def call(self, q, indices, lengths, cos, sin):
        if self.form == "gathered":
            codes, scales = ops.attention_gathered_rope_quant(
                q, self.cache, indices, self.sink, cos, sin, 512**-0.5, self.groups, lengths=lengths)  # fmt: skip
        else:
            codes, scales = ops.attention_paged_fp8_rope_quant(
                q, self.cache, indices, self.sink, cos, sin, 512**-0.5, self.groups, 16, lengths=lengths)  # fmt: skip
        return codes, scales, ops.fp8_bgemm(codes, scales, self.weight, self.factors, weight_ready=True)

    def captured(self):
        """(replay, results) of a graph over the static buffers; without a GPU, the call itself."""
        if self.device.type != "cuda":
            outs = list(self.call(**self.state))

            def run():
                outs[:] = self.call(**self.state)

            return run, outs
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.call(**self.state)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = list(self.call(**self.state))
        return graph.replay, outs


def bits(x):
    return x.view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["gathered", "paged"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_decode_steps_through_one_graph(device, form, tokens):
    device = torch.device(device)
    decode = Decode(form, tokens, device, small=device.type == "cpu")
    replay, outs = decode.captured()
    used, wrong = None, []
    for step in range(STEPS[device.type]):
        decode.write(step)
        values = decode.fresh(step)
        for name, value in values.items():
            decode.state[name].copy_(value)
        replay()
        eager = decode.call(**values)
        if not all(torch.equal(bits(a), bits(b)) for a, b in zip(outs, eager)):
            wrong.append(step)
        assert torch.isfinite(outs[2]).all(), step
        if device.type == "cuda" and step == 10:
            used = torch.cuda.memory_allocated()
    record(device, {"form": form, "tokens": tokens, "steps": STEPS[device.type], "different": len(wrong)})
    assert not wrong, f"{len(wrong)} of {STEPS[device.type]} steps differ from eager, first {wrong[:5]}"
    if used is not None:
        assert abs(torch.cuda.memory_allocated() - used) < 2**20, "memory grows from step to step"


def record(device, row):
    """Keep a row in the file that is asked for, in place of an older one of the same case."""
    path = os.environ.get("FUSION_PASS_SOAK_RECORD")
    if not path:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    made = {"test": "tests/kernels/test_soak.py", "device": name, "torch": torch.__version__,
            "date": datetime.date.today().isoformat()}
    kept = json.loads(Path(path).read_text())["rows"] if Path(path).is_file() else []
    rows = [old for old in kept if (old["form"], old["tokens"]) != (row["form"], row["tokens"])]
    Path(path).write_text(json.dumps({**made, "rows": [*rows, row]}, indent=1) + "\n")


def test_counts_are_kept(tmp_path, monkeypatch):
    path, cpu = tmp_path / "soak.json", torch.device("cpu")
    row = {"form": "paged", "tokens": 1, "steps": 12, "different": 1}
    monkeypatch.delenv("FUSION_PASS_SOAK_RECORD", raising=False)
    record(cpu, row)
    assert not path.exists(), "nobody asked for them"
    monkeypatch.setenv("FUSION_PASS_SOAK_RECORD", str(path))
    for one in (row, {**row, "tokens": 8}, {**row, "different": 0}):
        record(cpu, one)
    kept = json.loads(path.read_text())
    assert kept["device"] == "cpu" and kept["torch"] == torch.__version__
    assert sorted((r["tokens"], r["different"]) for r in kept["rows"]) == [(1, 0), (8, 1)]
