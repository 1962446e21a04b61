# SPDX-License-Identifier: Apache-2.0
"""One test for every fault that the fuzz tests of the ops have found; docs/contributing.md lists the docstrings."""

import torch
from fusion_pass.kernels import reference
from fusion_pass.kernels.ops import SPECS  # noqa: F401  (registers the ops)
from op_cases import Maker

ops = torch.ops.fusion_pass
NAN = float("nan")


def test_not_a_number_stays_in_its_own_block():
    """A NaN in a block with power-of-two scales spilt into the packed exponent of the next block (reference)."""
    m = Maker()
    o, (cos, sin) = m.normal(3, 4, 128), m.rope(3, half=16)
    want = [reference.dequantise(*ops.inverse_rope_quant(o, cos, sin, 1, 128, "ue8m0", 1e-12, packed), 128)
            for packed in (False, True)]  # fmt: skip
    o[1, 2, 5] = NAN
    for packed in (False, True):
        got = reference.dequantise(*ops.inverse_rope_quant(o, cos, sin, 1, 128, "ue8m0", 1e-12, packed), 128)
        got, sound = got.view(3, 4, 128), want[packed].view(3, 4, 128)
        assert torch.isnan(got[1, 2, 5]) and torch.isnan(got).sum() == 1
        others = torch.ones(3, 4, dtype=torch.bool)
        others[1, 2] = False
        assert torch.equal(got[others], sound[others])


def test_not_a_number_does_not_silence_its_block():
    """A NaN in a block with power-of-two scales made the scale -0 and every other element 0 (reference)."""
    m = Maker()
    o, (cos, sin) = m.normal(1, 1, 128), m.rope(1, half=16)
    o[0, 0, 5] = NAN
    codes, scales = ops.inverse_rope_quant(o, cos, sin, 1, 128, "ue8m0")
    assert scales[0, 0, 0] > 0
    got = reference.dequantise(codes, scales, 128).view(128)
    assert torch.isnan(got[5]) and (got[torch.arange(128) != 5].abs() > 0).float().mean() > 0.9


def test_infinity_keeps_a_scale_that_a_byte_can_hold():
    """An infinity in a block got the exponent of infinity itself, which dequantises every element of it to NaN."""
    m = Maker()
    o, (cos, sin) = m.normal(1, 1, 128), m.rope(1, half=16)
    o[0, 0, 5] = float("inf")
    got = reference.dequantise(*ops.inverse_rope_quant(o, cos, sin, 1, 128, "ue8m0"), 128).view(128)
    assert torch.isinf(got[5]) and torch.isfinite(got[torch.arange(128) != 5]).all()


def test_what_is_not_finite_stays_in_its_channel():
    """Dense attention over a key with an infinite channel was NaN in all channels (reference; kernels, and the gathered
    form, have it in that channel only)."""
    m = Maker()
    q, kv, _, sink = m.dense(batch=1, queries=1, heads=1, dim=64, keys=5)
    q[..., 7] = 0.0
    q[..., 3] = -1.0
    kv[0, 2, 3] = float("inf")  # its score is -inf
    dense = ops.attention(q, kv, None, sink, 0.1)[0, 0, 0]
    gathered = ops.attention_gathered(q[0], kv[0], torch.arange(5)[None], sink, 0.1)[0, 0]
    assert torch.isnan(dense[3]) and torch.isnan(dense).sum() == 1
    torch.testing.assert_close(dense, gathered, equal_nan=True)
