"""What benchmarks do before and after they time, on a CPU: inputs, calls, checks, rows."""

import argparse
import contextlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import fusion_pass.kernels.ops  # noqa: E402, F401  (registers the ops)

from benchmarks import __main__, harness, host, inputs, kernel_profile  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402


def test_every_module_is_a_table_or_named_as_a_helper():
    for name in __main__.tables():
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert "\ndef run(args" in text, name
    assert {"host", "decode_graphs", "model"} <= set(__main__.tables())


def test_results_name_their_kernels(tmp_path):
    state = harness.kernels_state()
    assert len(state) == 8 and state == harness.kernels_state() == harness.environment()["kernels"]


@pytest.mark.parametrize("name, tokens", [("pro", 1), ("flash", 32)])
def test_calls_of_the_host_table_are_calls_of_the_ops(name, tokens, monkeypatch):
    monkeypatch.setattr(inputs, "DEVICE", "meta")
    shape, seen = SHAPES[name], {}
    for what, op, arguments in host.cases(shape, tokens):
        result = op(*arguments)
        seen[what] = tuple((result[0] if isinstance(result, tuple) else result).shape)
    assert seen["product"] == (tokens, shape.groups, shape.rank)
    assert seen["dense, masked"] == seen["gathered, quantised"] == (shape.groups, tokens, shape.group_width)


class Recorded:
    """Stands for an op: remembers a decision at its first call, as the ops do."""

    def __init__(self, plan):
        self.plan, self.calls = plan, []

    def __call__(self, *arguments):
        decision = host.decisions.recall("key") or host.decisions.remember("key", None)
        self.calls.append((host.decisions.REPLAYS, decision.plan is not None))
        decision.plan = self.plan if host.decisions.REPLAYS else None
        decision.outcome = "a stream's tensors coincide"


def test_host_times_say_how_the_call_was_launched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host.decisions, "REPLAYS", False)  # as FUSION_PASS_LAUNCH_PLANS=0 leaves it
    op = Recorded(plan=object())
    found = host.ways(op, (), samples=3)
    assert set(found) == {host.ORDINARY, host.REPLAY, host.FIRST} and all(us > 0 for us in found.values())
    assert op.calls[:7] == [(False, False)] * 7, "compiled, then the ordinary launches"
    assert op.calls[7] == (True, False) and op.calls[8:16] == [(True, True)] * 8, "recorded, then replayed"
    assert op.calls[16:] == [(True, False)] * 6, "first calls"
    assert host.decisions.REPLAYS is False and not host.decisions._known
    refused = host.ways(Recorded(plan=None), (), samples=3)
    assert refused[host.REPLAY] == "a stream's tensors coincide" and refused[host.FIRST] > 0


def test_kernels_by_category():
    own = {"attention_kernel", "merge_kernel"}
    names = {
        "attention_kernel": kernel_profile.ATTENTION,
        "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversalINS5_17"
        "GroupProblemShapeIN4cute5tuple": kernel_profile.EXPERTS,
        "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>": kernel_profile.EXPERTS,
        "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT": kernel_profile.GEMMS,
        "void cublasLt::splitKreduce_kernel<32, 16, int>": kernel_profile.GEMMS,
        "void dot_kernel<float, 128, 0, cublasDotParams<...>>": kernel_profile.GEMMS,
        "triton_poi_fused__grouped_mm_clamp_ge_masked_fill_mul_silu_28": kernel_profile.REST,
        "void at::native::radixSortKVInPlace<-2, -1, 32, 32>": kernel_profile.REST,
    }  # fmt: skip
    assert {name: kernel_profile.category(name, own) for name in names} == names


def test_own_kernels_are_found():
    from fusion_pass.kernels.triton import mask_lists, merge  # noqa: F401

    assert {"merge_kernel", "list_visible_keys"} <= kernel_profile.own_kernels()


def test_difference():
    from benchmarks import model

    a, b = torch.randn(2, 1, 700, 5, dtype=torch.float64)
    assert model.difference(a, b) == pytest.approx(((a - b).norm() / b.norm()).item())
    assert model.difference(b, b) == 0


@pytest.fixture(scope="module")
def tiny():
    pytest.importorskip("transformers", minversion="5.8")
    from fusion_pass.models import random_deepseek_v4

    return random_deepseek_v4("tiny", layer_types=["sliding_attention"], experts="batched_mm")


@pytest.fixture
def on_a_cpu(tiny, monkeypatch):
    """The tiny model in place of the slice, nothing compiled, and no GPU to wait for or to ask for its memory."""
    from benchmarks import decode_graphs, model

    monkeypatch.setattr(model, "build", lambda form: tiny)
    monkeypatch.setattr(model, "DECODE_CONTEXT", 12)
    monkeypatch.setattr(model, "_variants", lambda m: {"eager": m, "inductor": m})
    monkeypatch.setattr(decode_graphs, "_compiled", lambda m, variant, way: m)
    for name, value in {"synchronize": None, "reset_peak_memory_stats": None, "max_memory_allocated": 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


@pytest.mark.parametrize("case", [("bf16", "prefill", 12), ("bf16", "decode", 2)])
def test_models_are_prepared_and_timed(on_a_cpu, case):
    from benchmarks import model

    rows = model.prepare(case, contextlib.nullcontext())()
    assert [(row["variant"], row["phase"], row["T"], row["peak_gib"]) for row in rows] == [
        ("eager", case[1], case[2], 1.0), ("inductor", case[1], case[2], 1.0)]  # fmt: skip
    assert all(row["ms"] > 0 and row["difference_from_eager"] == 0 for row in rows), "caches are copies of one"
    assert ["note" in row for row in rows] == [case[1] == "decode"] * 2


def test_a_decode_step_is_prepared_and_timed(on_a_cpu, tiny):
    from benchmarks import decode_graphs

    row = {}
    with torch.no_grad():
        decode_graphs.prepare_step(tiny, 2, "inductor", "reduce-overhead", row, context=12)()
    assert row["difference_from_eager"] == 0 and row["ms"] > 0 and row["us"] == pytest.approx(row["ms"] * 1e3)


def test_cases_of_the_model_tables(monkeypatch):
    """Rows of cases that failed stay in the table, named; ratios come from the others."""
    from benchmarks import decode_graphs, model

    def cases(prepare, cases, *, go):
        return [
            "it broke" if case[0] == 8 else [{**decode_graphs._labels(case), "ms": 3.0 - ("fusion" in case[1])}]
            for case in cases
        ]

    monkeypatch.setattr(decode_graphs.processes, "run_cases", cases)
    options = argparse.Namespace(tokens=None, go=None, profile=True)
    rows = decode_graphs.run(options)
    assert [row["failed"] for row in rows if row["batch"] == 8] == ["it broke"] * 4
    ratios = {row["variant"]: row["relative_to_inductor"] for row in rows if row["way"] == "captured" and "ms" in row}
    assert ratios == {"inductor": 1.0, "fusion_pass": 0.667}
    monkeypatch.setattr(model.processes, "run_cases", lambda prepare, cases, *, go: [[] for _ in cases])
    assert model.run(options) == []
