# SPDX-License-Identifier: Apache-2.0
"""Indices and lengths that point outside: a clear error with ``check_inputs=True``; without it they count as "no key"
and nothing outside the pool is read. The pools here are cut out of larger buffers whose other rows are NaN."""

import pytest
import torch
from fusion_pass.kernels import modes
from fusion_pass.kernels.ops import SPECS
from op_cases import DEVICES, Maker

GATHERED = ["attention_gathered", "attention_gathered_rope", "attention_gathered_rope_quant", "attention_partials"]
PAGED = ["attention_paged_fp8", "attention_paged_fp8_rope", "attention_paged_fp8_rope_quant"]
NAN_BYTE = 0xFF  # an E4M3 NaN, and half of a bf16 NaN


def guarded(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` as the middle of a buffer whose other rows are NaN (for byte pages: NaN bytes)."""
    before, after = 7, 9
    buffer = rows.new_empty(before + rows.shape[0] + after, *rows.shape[1:])
    buffer.fill_(NAN_BYTE if rows.dtype == torch.uint8 else float("nan"))
    inside = buffer[before : before + rows.shape[0]]
    inside.copy_(rows)
    return inside


def case(name: str, m: Maker, tokens: int = 5, dim: int = 512) -> dict:
    """Arguments by name, pools guarded, every index valid or -1, two pools with lengths."""
    if name in PAGED:
        q, pages, indices, sink = m.paged(tokens)
        indices = indices.clamp(max=23)  # 3 pages of 8 rows
        found = {"q": q, "pages": guarded(pages), "indices": indices, "sink": sink, "scale": 0.05, "page_size": 8}
        found |= {"extra_pages": guarded(m.pages(5, 4)), "extra_indices": m.integers(-1, 20, (tokens, 6))}
        found |= {"extra_page_size": 4}
    else:
        q, kv, indices, sink = m.gathered(tokens, 4, dim)
        found = {"q": q, "kv": guarded(kv), "indices": indices, "sink": sink, "scale": 0.05}
        found |= {"extra_kv": guarded(m.normal(30, dim)), "extra_indices": m.integers(-1, 30, (tokens, 6))}
    found |= {"lengths": m.integers(4, 10, (tokens,)), "extra_lengths": m.integers(3, 7, (tokens,))}
    if "rope" in name:
        found |= dict(zip(("cos", "sin"), m.rope(tokens))) | {"groups": 2}
    if name == "attention_partials":
        found["num_splits"] = 3
        del found["sink"]
    return found


def call(name: str, given: dict, **mode) -> list[torch.Tensor]:
    result = getattr(torch.ops.fusion_pass, name)(**given, **mode)
    return list(result) if isinstance(result, tuple) else [result]


def with_entry(given: dict, prefix: str, token: int, column: int, value: int) -> dict:
    indices = given[f"{prefix}indices"].long().clone()
    indices[token, column] = value
    return {**given, f"{prefix}indices": indices}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*GATHERED, *PAGED])
def test_clear_error(name, device):
    given = case(name, Maker(device, torch.bfloat16 if device == "cuda" else torch.float32))
    call(name, given, check_inputs=True)
    rows = {"": 24 if name in PAGED else 40, "extra_": 20 if name in PAGED else 30}
    for prefix, bad in (("", rows[""]), ("", -2), ("extra_", rows["extra_"] + 5), ("extra_", 2**40)):
        with pytest.raises(ValueError, match=rf"{prefix}indices\[3, 1\] = {bad} \(1 such entries\)") as error:
            call(name, with_entry(given, prefix, 3, 1, bad), check_inputs=True)
        assert f"0 .. {rows[prefix] - 1}" in str(error.value) and f"fusion_pass::{name}" in str(error.value)
        assert ("pages" in str(error.value)) == (name in PAGED)
    # Columns behind a token's length are not read, so they may hold anything.
    short = {**given, "lengths": torch.full_like(given["lengths"], 4)}
    call(name, with_entry(short, "", 2, 4, 10**6), check_inputs=True)
    for bad in (-1, 10):
        lengths = given["lengths"].clone()
        lengths[2] = bad
        with pytest.raises(ValueError, match=rf"lengths\[2\] = {bad}"):
            call(name, {**given, "lengths": lengths}, check_inputs=True)


def outside(given: dict, name: str) -> tuple[dict, dict]:
    """The case with a sixth of its indices outside their pools, and the same with -1 there."""
    bad, masked = dict(given), dict(given)
    size = {"": 24 if name in PAGED else 40, "extra_": 20 if name in PAGED else 30}
    for prefix in ("", "extra_"):
        indices = given[f"{prefix}indices"].long().clone()
        wrong = torch.tensor([size[prefix], size[prefix] + 3, -2, -(2**31), 2**31 - 1, 2**40], device=indices.device)
        place = torch.arange(indices.numel(), device=indices.device).view_as(indices) % 6 == 2
        bad[f"{prefix}indices"] = torch.where(place, wrong[torch.arange(indices.numel()) % 6].view_as(indices), indices)
        bad[f"{prefix}indices"][:, 0] = wrong[: indices.shape[0]]
        masked[f"{prefix}indices"] = indices.masked_fill(place, -1)
        masked[f"{prefix}indices"][:, 0] = -1
    return bad, masked


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*GATHERED, *PAGED])
def test_masked_by_default(name, device):
    """Bit for bit what -1 gives; NaN guard rows on both sides of every pool are not read."""
    bad, masked = outside(case(name, Maker(device, torch.bfloat16 if device == "cuda" else torch.float32)), name)
    for got, want in zip(call(name, bad), call(name, masked)):
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
        assert not torch.isnan(got.float()).any()


@pytest.mark.parametrize("name", [*GATHERED, "attention_paged_fp8_rope_quant"])
def test_masked_by_the_portable_kernels(name):
    """The same through the interpreted kernels, where a GPU would run them."""
    pytest.importorskip("triton")
    from fusion_pass.kernels.triton import launchers
    from fusion_pass.kernels.triton.interpreter import interpreted

    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    names = {"attention_gathered": "gathered", "attention_gathered_rope": "gathered_rope"}
    names |= {"attention_gathered_rope_quant": "gathered_quant", "attention_partials": "partials"}
    launch = getattr(launchers, f"_launch_{names.get(name, 'paged_quant')}")
    results = []
    for given in outside(case(name, Maker(), dim=128), name):
        bound = SPECS[name].signature.bind(**given)
        bound.apply_defaults()
        outs = SPECS[name].empty(*bound.args)
        launch(outs, *bound.args)
        results.append(outs)
    for got, want in zip(*results):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) and not torch.isnan(got.float()).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", GATHERED)
def test_lengths_beyond_the_list(name, device):
    """A length beyond the list ends with the list: the lists are cut out of wider ones whose further columns name NaN
    rows. A negative length is an empty list."""
    m = Maker(device, torch.bfloat16 if device == "cuda" else torch.float32)
    given = case(name, m)
    kv = torch.cat((given["kv"], torch.full_like(given["kv"][:1], float("nan"))))
    wide = torch.cat((given["indices"], torch.full_like(given["indices"], 40)), 1)
    given |= {"kv": kv, "indices": wide[:, : given["indices"].shape[1]]}
    columns = given["indices"].shape[1]
    long = {**given, "lengths": torch.tensor([columns + 1, 2 * columns, 2**30, columns, -3], device=device).int()}
    want = {**given, "lengths": torch.tensor([columns, columns, columns, columns, 0], device=device).int()}
    for a, b in zip(call(name, long), call(name, want)):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        assert not torch.isnan(a.float()).any()


@pytest.mark.gpu
def test_left_out_under_capture():
    """A CUDA graph cannot wait for an answer: the check says so once and the op runs."""
    given = case("attention_gathered", Maker("cuda", torch.bfloat16))
    want = call("attention_gathered", given, check_inputs=True)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call("attention_gathered", given, check_inputs=True)[0]
    graph.replay()
    assert torch.equal(got, want)


def test_ops_that_read_lists_have_the_mode():
    has = {name for name, spec in SPECS.items() if "check_inputs" in spec.modes}
    assert has == {*GATHERED, *PAGED}
    assert all((spec.check_values is not None) == (name in has) for name, spec in SPECS.items())
    assert set(modes.Modes.__dataclass_fields__) == {"batch_invariant", "check_inputs", "weight_ready"}
