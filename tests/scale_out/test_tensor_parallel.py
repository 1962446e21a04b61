"""Heads and output groups split over ranks: two gloo ranks started by torchrun, and the gate against split groups."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", minversion="5.8")

import fusion_pass  # noqa: E402
from fusion_pass.gate import partition_gate  # noqa: E402
from fusion_pass.models import random_deepseek_v4, replace_grouped_linear, split_attention  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "tensor_parallel.py"
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
BF16, FP8 = ["fmha", "inverse_rope", "bgemm"], ["fmha", "inverse_rope", "fp8_quant", "bgemm"]


def torchrun(*command, expected=0):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, command)],
        env=environment, capture_output=True, text=True, timeout=600)
    print(run.stdout)
    assert (run.returncode == 0) == (expected == 0), run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("layers", [("compressed_sparse_attention",), pytest.param(KINDS, marks=pytest.mark.slow)])
def test_two_ranks_give_the_logits_of_one(layers, tmp_path):
    """One kind of layer takes a third of the time that all three take (the whole model and both ranks are compiled)."""
    torchrun(SCRIPT, "--inner", "aot_eager", "--layers", *layers, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [rank["fused"] for rank in figures["ranks"]] == [[BF16] * len(layers)] * 2, "every layer's, on each rank"
    assert not any(rank["gated"] or rank["near_misses"] for rank in figures["ranks"])
    # float32: what is left is the order of the sums.
    assert figures["split_to_one_rank"] < 1e-5
    assert figures["split_to_float64"] < 1.5 * figures["one_rank_to_float64"]


@pytest.mark.slow
def test_two_ranks_with_inductor_and_fp8(tmp_path):
    torchrun(SCRIPT, "--form", "fp8", "--dtype", "bfloat16", "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [rank["fused"] for rank in figures["ranks"]] == [[FP8] * 3] * 2
    assert figures["split_to_float64"] < 1.5 * figures["one_rank_to_float64"]


def test_transformers_expert_parallel_plan_is_left_working(tmp_path):
    pytest.importorskip("accelerate")
    torchrun(Path(__file__).with_name("expert_parallel.py"), tmp_path / "model", tmp_path / "figures.json")
    ranks = json.loads((tmp_path / "figures.json").read_text())
    if "refused" in ranks:
        pytest.skip(f"transformers itself refuses the plan: {ranks['refused']}")
    for rank in ranks:
        assert rank["fused"] == [BF16] and rank["difference"] < 1e-5
        experts = [shape for name, shape in rank["split"].items() if name.endswith("experts.gate_up_proj")]
        assert [shape[0] for shape in experts] == [2], "half of four experts are on each rank"
        assert any("indexer.q_b_proj" in name for name in rank["split"])


@pytest.fixture
def two_ranks():
    """A process group of two of which this process is one, without the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def explained(model, tokens=24):
    with torch.no_grad():
        return fusion_pass.explain(model)(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)


def test_a_rank_count_that_splits_a_group_is_refused():
    model = random_deepseek_v4("tiny", layer_types=["sliding_attention"], num_attention_heads=8, o_groups=1)
    with pytest.raises(ValueError, match="2 ranks split a group: o_groups = 1 is not divisible by 2"):
        split_attention(model, 0, 2)


def test_a_split_group_is_gated_in_the_graph(two_ranks):
    """Whoever splits a group by hand gets right numbers, unfused, and the reason."""
    model = random_deepseek_v4("tiny", layer_types=["sliding_attention"], num_attention_heads=8, o_groups=1)
    split_attention(model, 0, 2, split_groups=True)
    report = explained(model)
    assert not report.fused and not report.near_misses, str(report)
    gated, = report.gated
    assert list(gated.roles) == BF16 and "a group is split over ranks" in gated.gate


def test_parts_of_all_ranks_make_the_whole_layer(two_ranks):
    """The sum over ranks is left out by the fake group: the parts are added here."""
    whole = random_deepseek_v4("tiny", layer_types=["sliding_attention"], dtype=torch.float32)
    for form in ("bf16", "fp8"):
        if form == "fp8":
            replace_grouped_linear(whole, "fp32")
        layer = whole.model.layers[0].self_attn
        x = torch.randn(1, 6, 256, generator=torch.Generator().manual_seed(0))
        angles = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
        rest = {"position_embeddings": {"main": (angles.cos(), angles.sin())},
                "position_ids": torch.arange(6)[None], "attention_mask": None}
        parts = []
        with torch.no_grad():
            for rank in range(2):
                part = copy.deepcopy(whole)
                assert split_attention(part, rank, 2) == ["model.layers.0.self_attn"]
                parts.append(part.model.layers[0].self_attn(x, **rest)[0])
            torch.testing.assert_close(parts[0] + parts[1], layer(x, **rest)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads, groups, ranks, fits", [
    (64, 8, 1, True), (64, 8, 2, True), (64, 8, 8, True), (128, 16, 16, True), (128, 16, 1, True),
    (64, 8, 16, False), (64, 8, 3, False), (128, 16, 32, False), (8, 1, 2, False), (9, 2, 1, False), (8, 2, 0, False),
])
def test_partition_gate(heads, groups, ranks, fits):
    decision = partition_gate(heads, groups, ranks)
    assert decision.fuse == fits
    assert str(heads) in decision.reason or f"o_groups = {groups}" in decision.reason


@pytest.mark.parametrize("local_heads", [8, pytest.param(32, marks=pytest.mark.slow), 128])
def test_local_heads(local_heads):
    """What a rank is left with, from one group to the whole of V4-Pro, is fused."""
    model = random_deepseek_v4("tiny", layer_types=["sliding_attention"], num_attention_heads=local_heads,
                               o_groups=local_heads // 8)
    report = explained(model)
    assert [list(chain.roles) for chain in report.fused] == [BF16], str(report)
    assert f"{local_heads} heads in {local_heads // 8} groups" in report.fused[0].gate


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="no DeepSeek-V4 attention"):
        split_attention(torch.nn.Linear(2, 2), 0, 2)
    with pytest.raises(ValueError, match="rank from 0 to 1"):
        split_attention(torch.nn.Linear(2, 2), 2, 2)
