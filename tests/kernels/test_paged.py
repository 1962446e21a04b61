# SPDX-License-Identifier: Apache-2.0
"""Attention over paged FP8 caches: the byte layout, the ops against float64, the row decoder, refused arguments."""

import pytest
import torch
from fusion_pass.kernels import reference
from fusion_pass.kernels.gluon import attention as hopper
from fusion_pass.kernels.gluon import gate
from op_cases import DEVICES, Maker, gathered_formula, relative_error

ops = torch.ops.fusion_pass


def row_by_hand(pages, page_size, index):
    """One cache row in float64, decoded byte by byte."""
    page, offset = divmod(index, page_size)
    data = pages[page].tolist()
    start = offset * 576
    values = []
    for channel in range(448):
        code = data[start + channel]
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        power = data[page_size * 576 + offset * 8 + channel // 64] - 127
        values.append((-magnitude if code & 128 else magnitude) * 2.0**power)
    for channel in range(64):
        low, high = data[start + 448 + 2 * channel : start + 450 + 2 * channel]
        bits = torch.tensor((high << 8 | low) << 16 & 0xFFFFFFFF, dtype=torch.int64).to(torch.int32)
        values.append(float(bits.view(torch.float32)))
    return torch.tensor(values, dtype=torch.float64)


def test_layout_by_hand():
    make = Maker()
    pages = make.pages(3, 8)
    rows = reference.decode_pages(pages, 8, torch.float64)
    for index in (0, 7, 8, 21):
        assert torch.equal(rows[index], row_by_hand(pages, 8, index)), index


@pytest.mark.parametrize("device", DEVICES)
def test_two_caches_against_float64(device):
    make = Maker(device, torch.bfloat16)
    q, pages, indices, sink = make.paged(tokens=6, heads=8)
    extra, extra_indices = make.pages(5, 4), make.integers(-1, 22, (6, 7))
    lengths = make.integers(0, 8, (6,))
    out = ops.attention_paged_fp8(q, pages, indices, sink, 0.05, 8, None, extra, extra_indices, lengths, 4)
    kv, extra_kv = (reference.decode_pages(p, s, torch.float64) for p, s in ((pages, 8), (extra, 4)))
    expected = gathered_formula(q, kv, indices, sink, 0.05, None, extra_kv, extra_indices, lengths)
    assert relative_error(out, expected) < 4e-3


@pytest.mark.parametrize("device", DEVICES)
def test_four_dimensional_cache_is_the_same_bytes(device):
    make = Maker(device, torch.bfloat16)
    q, pages, indices, sink = make.paged()
    view = pages.as_strided((3, 8, 1, 584), (pages.stride(0), 584, 584, 1))
    flat = ops.attention_paged_fp8(q, pages, indices, sink, 0.05, 8)
    assert torch.equal(flat, ops.attention_paged_fp8(q, view, indices, sink, 0.05, 8))


@pytest.mark.parametrize(
    "change, error",
    [
        ({"pages": torch.zeros(3, 8 * 584 - 1, dtype=torch.uint8)}, ValueError),
        ({"pages": torch.zeros(3, 8 * 584)}, TypeError),
        ({"page_size": 0}, ValueError),
        ({"indices": torch.zeros(4, 9, dtype=torch.int32)}, ValueError),
        ({"q": torch.zeros(5, 4, 256)}, ValueError),
        ({"extra_pages": torch.zeros(3, 8 * 584, dtype=torch.uint8)}, ValueError),
    ],
)
def test_refused_arguments(change, error):
    q, pages, indices, sink = Maker().paged()
    arguments = {"q": q, "pages": pages, "indices": indices, "sink": sink, "scale": 0.05, "page_size": 8} | change
    with pytest.raises(error):
        ops.attention_paged_fp8(**arguments)


def test_decoder_kernel_matches_the_reference():
    if torch.cuda.is_available():
        pytest.skip("the op's tests on the GPU run the decoder natively")
    from fusion_pass.kernels.triton.paged import decoded_chunks

    make = Maker(dtype=torch.bfloat16)
    q, pages, indices, _ = make.paged(tokens=3, columns=5)
    rows = reference.decode_pages(pages, 8, torch.bfloat16)
    lengths = torch.tensor([5, 2, 0], dtype=torch.int32)
    for token0, tokens, decoded, lists in decoded_chunks(q, pages, 8, indices, lengths, None, None, None, 0):
        for t in range(tokens):
            for k in range(5):
                index = int(indices[token0 + t, k])
                valid = 0 <= index < rows.shape[0] and k < int(lengths[token0 + t])
                assert (int(lists[t, k]) >= 0) == valid
                if valid:
                    assert torch.equal(decoded[int(lists[t, k])], rows[index])


def test_hopper_gate_names_its_reason():
    q = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
    assert gate.attention_reason(q, None, scale=0.1) == "device cpu"


def test_deepgemm_is_used_only_when_asked_for(monkeypatch):
    from fusion_pass.kernels.gluon import deepgemm

    args = (*Maker().bgemm(), 128, 128, torch.bfloat16)
    monkeypatch.delenv(deepgemm.SWITCH, raising=False)
    assert deepgemm.SWITCH in deepgemm.refuses(*args)
    monkeypatch.setenv(deepgemm.SWITCH, "deepgemm")
    assert deepgemm.refuses(*args) == "device cpu"


@pytest.mark.parametrize(
    "tokens, heads, keys",
    [(1, 128, 1152), (8, 128, 1152), (32, 128, 1152), (64, 128, 1152), (3, 8, 1), (70, 128, 1152), (1024, 128, 1152)],
)
def test_splits_fill_the_gpu_without_empty_shares(tokens, heads, keys):
    chosen = hopper.plan(tokens, heads, keys, 132)
    tiles, rows = -(-keys // 64), tokens * -(-heads // 64)
    assert chosen.splits == 1 or chosen.cut * -(-heads // 64) * chosen.splits <= 132
    assert (chosen.splits - 1) * -(-tiles // chosen.splits) < tiles
    assert chosen.cut in (0, tokens) or (tokens - chosen.cut) * -(-heads // 64) <= rows // 132 * 132
    assert hopper.plan(tokens, heads, keys, 132, cut=False).cut in (0, tokens)
