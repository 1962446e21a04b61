"""The chain table in torch's own operations: what it computes, and that the pass turns it into the two fused ops."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import fusion_pass  # noqa: E402
from benchmarks import chain, harness, inputs, unfused  # noqa: E402
from benchmarks.shapes import Shape  # noqa: E402

SMALL = Shape("small", heads=4, groups=2, window_keys=5, compressed_keys=40, rank=128)


@pytest.fixture
def case(monkeypatch):
    """(inputs of 3 tokens, projection, chain in float64)"""
    monkeypatch.setattr(inputs, "DEVICE", "cpu")
    x = inputs.attention_inputs(SMALL, 3, *inputs.pools(2, rows=100))
    x.extra_indices[1, 7:] = -1
    w = inputs.projection(SMALL)
    return x, w, chain.reference(x, w, SMALL.groups, [0, 1, 2])


def test_it_is_the_chain(case):
    x, w, expected = case
    out = unfused.call(unfused.unfused, x, w)
    assert out.shape == (3, SMALL.groups, SMALL.rank)
    assert harness.norm_error(out, expected) < chain.ERROR_LIMIT


def test_the_pass_makes_the_ops_of_the_fused_rows(case):
    x, w, expected = case
    known = len(fusion_pass.reports())
    compiled = torch.compile(
        unfused.unfused, backend="fusion_pass", fullgraph=True, options={"inner": "eager", "strict": True}
    )
    out = unfused.call(compiled, x, w)
    (report,) = fusion_pass.reports()[known:]
    ops = "fusion_pass.attention_gathered_rope_quant + fusion_pass.fp8_bgemm"
    assert [(c.op, c.quant) for c in report.fused] == [(ops, "ue8m0")], str(report)
    assert harness.norm_error(out, expected) < chain.ERROR_LIMIT
