# SPDX-License-Identifier: Apache-2.0
"""``batch_invariant=True``: a token's result is the same bits whatever else is in the batch, through every op that
could choose by the number of tokens. On the CPU: the references, and the Triton kernels interpreted as on a GPU with 8
multiprocessors (where few tokens are split and many are not). On a GPU: whatever the ops launch."""

import inspect

import pytest
import torch
from op_cases import DEVICES, Maker

pytest.importorskip("triton")

from fusion_pass.kernels import modes  # noqa: E402
from fusion_pass.kernels.ops import SPECS  # noqa: E402
from fusion_pass.kernels.triton import attention_launch, launchers, reduce_launchers  # noqa: E402
from fusion_pass.kernels.triton.interpreter import interpreted  # noqa: E402

LAUNCH = {
    "attention": launchers._launch_dense,
    "attention_rope": launchers._launch_dense_rope,
    "attention_rope_quant": launchers._launch_dense_quant,
    "attention_gathered": launchers._launch_gathered,
    "attention_gathered_rope": launchers._launch_gathered_rope,
    "attention_gathered_rope_quant": launchers._launch_gathered_quant,
    "attention_paged_fp8_rope_quant": launchers._launch_paged_quant,
    "merge_partials": reduce_launchers._launch_merge,
    "merge_partials_rope": reduce_launchers._launch_merge_rope,
    "merge_partials_rope_quant": reduce_launchers._launch_merge_rope_quant,
    "inverse_rope_quant": reduce_launchers._launch_rope_quant,
    "fp8_bgemm": launchers._launch_bgemm,
}
NAMES = list(LAUNCH)


def case(name: str, m: Maker, tokens: int, heads: int, columns: int, dim: int = 512) -> dict:
    """Arguments of op ``name`` by name, for ``tokens`` tokens."""
    groups = max(1, heads // 8)
    rope = dict(zip(("cos", "sin"), m.rope(tokens)))
    attention = {"scale": dim**-0.5}
    if name.startswith("attention"):
        if "gathered" in name:
            q, kv, indices, sink = m.gathered(tokens, heads, dim, 3 * columns, columns)
            more = {"lengths": m.integers(1, columns + 1, (tokens,)), "extra_kv": m.normal(90, dim)}
            more |= {"extra_indices": m.integers(-1, 90, (tokens, 70)), "extra_lengths": m.integers(0, 71, (tokens,))}
            found = {"q": q, "kv": kv, "indices": indices, "sink": sink, **attention, **more}
        elif "paged" in name:
            q, _, indices, sink = m.paged(tokens, heads, columns)
            pages = m.pages(3, 8, 48)  # aligned to 16 bytes: the Hopper kernel decodes them itself
            found = {"q": q, "pages": pages, "indices": indices, "sink": sink, "page_size": 8, **attention}
        else:
            mask = "bool" if "rope" in name else "none"
            q, kv, mask, sink = m.dense(1, tokens, heads, dim, tokens + columns, mask=mask)
            found = {"q": q, "kv": kv, "mask": mask, "sink": sink, **attention, "causal": True, "window": columns - 3}
            rope = {table: rope[table][None] for table in rope}
    elif name.startswith("merge"):
        partials, lse = m.partials(max(2, columns // 16), tokens, heads, dim)
        found = {"partials": partials, "lse_or_max": lse, "sum": None, "sink": m.normal(heads, dtype=torch.float32)}
    elif name == "fp8_bgemm":
        return dict(zip(("codes", "scales", "weight", "weight_scales"), m.bgemm(groups, tokens, 256, 1024)))
    else:
        found = {"o": m.normal(tokens, heads, dim)}
    if "rope" in name:
        found |= {**rope, "groups": groups}
    return found


def alone(name: str, given: dict, t: int) -> dict:
    """The same call with token ``t`` only."""
    one = dict(given)
    for key in ("q", "indices", "lengths", "extra_indices", "extra_lengths", "cos", "sin", "o"):
        if given.get(key) is not None:
            one[key] = given[key][t : t + 1]
    for key in ("partials", "lse_or_max", "codes"):
        if key in given:
            one[key] = given[key][:, t : t + 1]
    if "scales" in given:
        one["scales"] = torch.nn.functional.pad(given["scales"][..., t : t + 1], (0, 3))
    if "causal" in given:
        seen = given["kv"].shape[1] - given["q"].shape[1] + t + 1
        one["q"], one["kv"] = given["q"][:, t : t + 1], given["kv"][:, :seen]
        for key in ("cos", "sin"):
            if key in given:
                one[key] = given[key][:, t : t + 1]
        if given["mask"] is not None:
            one["mask"] = given["mask"][:, t : t + 1, :seen]
    return one


def row(name: str, results: tuple, t: int) -> list[torch.Tensor]:
    """The bits of token ``t`` in an op's results."""
    found = []
    for at, result in enumerate(results):
        if result.numel() == 0:
            continue
        if at == 1 and name.endswith("quant"):
            found.append(result[..., t])
        elif name == "attention":
            found.append(result[:, t])
        elif name.endswith(("rope", "quant")):
            found.append(result[:, t])
        else:
            found.append(result[t])
    return [x.contiguous().view(torch.uint8) for x in found]


def call(name: str, given: dict, **mode) -> tuple:
    result = getattr(torch.ops.fusion_pass, name)(**given, **mode)
    return result if isinstance(result, tuple) else (result,)


def interpret(name: str, given: dict, how: modes.Modes) -> tuple:
    """The portable launcher on CPU tensors, interpreted."""
    spec = SPECS[name]
    bound = spec.signature.bind(**given)
    bound.apply_defaults()
    outs = spec.empty(*bound.args)
    for out in outs:
        if out.numel():
            out.view(torch.uint8).fill_(0x7F)
    with modes.using(how):
        LAUNCH[name](outs, *bound.args)
    return outs


def same(name: str, run, given: dict, tokens) -> list[int]:
    """The tokens whose bits alone differ from their bits in the batch."""
    whole = run(given)
    return [
        t
        for t in tokens
        if not all(torch.equal(a, b) for a, b in zip(row(name, whole, t), row(name, run(alone(name, given, t)), 0)))
    ]


@pytest.fixture
def small_gpu(monkeypatch):
    """The launchers choose as for a GPU of 8 multiprocessors, which one token does not fill and nine do."""
    monkeypatch.setattr(attention_launch, "device_of", lambda q: ((9, 0), 8))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_interpreted(small_gpu, name):
    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    heads, dim = (2, 512) if "paged" in name else (4, 128)
    given = case(name, Maker(), tokens=9, heads=heads, columns=130, dim=dim)
    if name == "fp8_bgemm":
        given = dict(zip(("codes", "scales", "weight", "weight_scales"), Maker().bgemm(2, 20, 64, 256)))
    on = modes.Modes(batch_invariant=True)
    assert same(name, lambda g: interpret(name, g, on), given, (0, 5, 8)) == []


def test_interpreted_split_depends_on_the_batch(small_gpu):
    """The control: without the mode the number of splits, and with it the bits, depend on the number of tokens."""
    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    given = case("attention_gathered", Maker(), tokens=9, heads=4, columns=130, dim=128)
    assert same("attention_gathered", lambda g: interpret("attention_gathered", g, modes.OFF), given, (0, 5))


@pytest.mark.parametrize("name", NAMES)
def test_reference(name):
    given = case(name, Maker(), tokens=9, heads=8, columns=40, dim=512 if "paged" in name else 128)
    mode = {"batch_invariant": True} if SPECS[name].modes else {}
    assert same(name, lambda g: call(name, g, **mode), given, (0, 5, 8)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name, heads):
    """64 and 300 tokens against each alone; and run to run, in both modes."""
    mode = {"batch_invariant": True} if SPECS[name].modes else {}
    for tokens in (64, 300):
        m = Maker("cuda", torch.bfloat16 if "merge" not in name else torch.float32)
        given = case(name, m, tokens, heads, columns=300)
        if name == "fp8_bgemm":
            operands = m.bgemm(heads // 8, tokens, 1024, 4096)
            given = dict(zip(("codes", "scales", "weight", "weight_scales"), operands))
        assert same(name, lambda g: call(name, g, **mode), given, (0, 1, 33, tokens - 1)) == []
        for how in ({}, mode):
            first, second = call(name, given, **how), call(name, given, **how)
            for a, b in zip(first, second):
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), how


@pytest.mark.gpu
def test_bgemm_for_every_token_count():
    """One row at every token count of the tables' edges, wide and narrow, both forms of scales."""
    for groups in (16, 8):
        for packed in (False, True):
            m = Maker("cuda")
            codes, scales, weight, factors = m.bgemm(groups, 4096, 1024, 4096, packed=packed)
            rows = []
            for tokens in (1, 2, 8, 9, 16, 17, 64, 65, 128, 129, 192, 512, 513, 4096):
                columns = (tokens + 3) // 4 * 4
                part = scales[..., :columns].clone()
                part[..., tokens:] = 0
                given = (codes[:, :tokens], part, weight, factors)
                rows.append(torch.ops.fusion_pass.fp8_bgemm(*given, batch_invariant=True)[0])
            assert all(torch.equal(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_modes_do_not_outlive_a_call(device):
    m = Maker(device)
    torch.ops.fusion_pass.attention_gathered(*m.gathered(), 0.1, batch_invariant=True)
    assert modes.current() is modes.OFF
    with pytest.raises(ValueError, match="scale"):
        torch.ops.fusion_pass.attention_gathered(*m.gathered(), float("inf"), batch_invariant=True)
    assert modes.current() is modes.OFF


def test_every_op_that_chooses_by_tokens_has_the_mode():
    """Ops without it have nothing to choose: the epilogue alone is elementwise, and num_splits is an argument."""
    without = {name for name, spec in SPECS.items() if "batch_invariant" not in spec.modes}
    assert without == {"inverse_rope", "inverse_rope_quant", "attention_partials"}
    for spec in SPECS.values():
        assert not set(spec.modes) & set(inspect.signature(spec.reference).parameters)


@pytest.mark.parametrize("device", DEVICES)
def test_ops_of_engines(device):
    """The same through the three ops for engines: a token's projected row alone is its row in the batch."""
    m = Maker(device, torch.bfloat16)
    ops = torch.ops.fusion_pass
    tokens = 40
    q, kv, indices, sink = m.gathered(tokens, 16, 512, 300, 200)
    rope = m.rope(tokens)
    _, _, weight, factors = m.bgemm(2, 1, 128, 4096)

    def layer(part: slice) -> torch.Tensor:
        count = len(range(tokens)[part])
        outputs = ops.create_outputs(q[part], weight, 2, (count + 3) // 4 * 4)
        tables = [table[part] for table in rope]
        arguments = (q[part], kv, indices[part], sink, *tables, *outputs, 0.05, 2, outputs[2].shape[-1], True)
        ops.attention_into(*arguments, batch_invariant=True)
        return ops.project_outputs(outputs, *tables, weight, factors, 2, batch_invariant=True)

    whole = layer(slice(None))
    for t in (0, 13, tokens - 1):
        assert torch.equal(layer(slice(t, t + 1))[0], whole[t])
