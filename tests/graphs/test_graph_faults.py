# SPDX-License-Identifier: Apache-2.0
"""One test for every fault that the damaged graphs have found; docs/contributing.md lists the docstrings."""

import logging

import chains
import torch

import fusion_pass
from fusion_pass.advice import advice


def test_missing_metadata_is_no_failure_of_the_pass(caplog):
    """A node without metadata in the chain was warned of as a failure of the pass to be reported."""
    gm = chains.aot(chains.chain, chains.inputs())
    next(n for n in gm.graph.nodes if n.op == "call_function").meta.pop("val")
    with caplog.at_level(logging.WARNING, logger="fusion_pass"):
        report = fusion_pass.rewrite(gm)
    assert not report.fused and not [r for r in caplog.records if r.name.startswith("fusion_pass")]
    (note,) = report.notes
    assert "has no tensor value" in note and "FakeTensorProp" in note and "failed" not in note


def test_tensor_subclasses_are_not_rewritten():
    """A graph over a tensor subclass was fused, whatever the subclass makes of its operators."""

    class Negative(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return -super().__torch_function__(function, types, args, kwargs or {})

    gm = chains.raw(chains.chain, chains.inputs())
    gm.graph.find_nodes(op="placeholder")[1].meta["val"] = torch.ones(1, 7, chains.DIM).as_subclass(Negative)
    before = gm.code
    report = fusion_pass.rewrite(gm)
    assert not report.fused and gm.code == before and "subclass" in report.notes[0]


def test_quantisation_without_a_floor_is_gated(caplog):
    """A quantisation without a floor was warned of as a failure of the pass, and cost the graph its other chains."""
    def unbounded(x, block=128):
        blocks = x.float().unflatten(-1, (x.shape[-1] // block, block))
        scale = blocks.abs().amax(-1, keepdim=True) / 448.0
        return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    def two(q, kv, mask, sink, cos, sin, weight):
        o = chains.rotate(chains.attention(q, kv, mask, sink), cos, sin)
        first = chains.project(unbounded(o), weight)
        return first, chains.chain(q + 1, kv, mask, sink, cos, sin, weight)

    gm = chains.aot(two, chains.inputs())
    with caplog.at_level(logging.WARNING, logger="fusion_pass"):
        report = fusion_pass.rewrite(gm)
    assert not [r for r in caplog.records if r.name.startswith("fusion_pass")] and not report.notes
    (gated,) = report.gated
    assert "smallest magnitude is 0" in gated.gate and "Clamp the block maximum" in advice(gated)
    assert [chain.roles for chain in report.fused] == [("fmha", "inverse_rope", "bgemm")]
