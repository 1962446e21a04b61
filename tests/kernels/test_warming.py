"""fusion_pass.warmup: what it reads from a model's configuration, its errors; on a GPU: nothing compiles after it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fusion_pass.kernels import warm_up
from fusion_pass.kernels.tuning import attention, bgemm

import fusion_pass
from fusion_pass import warming

SIZES = {"heads": 16, "groups": 2, "rank": 128, "max_tokens": 40, "max_keys": 300}


def test_sizes_of_a_configuration():
    config = SimpleNamespace(num_attention_heads=64, o_groups=8, head_dim=512, qk_rope_head_dim=64, o_lora_rank=1024,
                             sliding_window=128, index_topk=512, dtype=torch.bfloat16)
    chain = fusion_pass.warmup(SimpleNamespace(config=config), device="cpu", tensor_parallel=4, kv=("gathered",)).chain
    assert (chain.heads, chain.groups, chain.rank, chain.rope_dim, chain.window) == (16, 2, 1024, 64, 128)
    assert chain.capacities == ((128, 0), (128, 512), (128, 64)) and chain.quant is None
    official = {"n_heads": 128, "o_groups": 16, "window_size": 128, "index_topk": 1024, "rope_head_dim": 64,
                "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}}
    chain = fusion_pass.warmup(official, device="cpu").chain
    assert (chain.heads, chain.groups, chain.quant, chain.weight_block) == (128, 16, "ue8m0", 128)


def test_transformers_configuration():
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, "DeepseekV4Config", None)
    if config is None:
        pytest.skip("needs transformers with DeepSeek-V4")
    chain = fusion_pass.warmup(config(), device="cpu").chain
    assert (chain.heads, chain.groups, chain.head_dim, chain.rank, chain.window) == (64, 8, 512, 1024, 128)


@pytest.mark.parametrize("sizes, error", [
    ({"heads": 8}, ValueError), ({"heads": 8, "groups": 3}, ValueError),
    ({"heads": 8, "groups": 2, "head": 4}, TypeError),
    ({"heads": 8, "groups": 2, "kv": ("pages",)}, ValueError), ({"heads": 8, "groups": 2, "kv": "dense"}, ValueError),
    ({"heads": 8, "groups": 2, "masks": ("causal",)}, ValueError), ({**SIZES, "max_tokens": 0}, ValueError),
])  # fmt: skip
def test_errors(sizes, error):
    with pytest.raises(error, match="warmup: "):
        fusion_pass.warmup(device="cpu", **sizes)
    with pytest.raises(ValueError, match="tensor_parallel to divide"):
        fusion_pass.warmup({"n_heads": 64, "n_groups": 8}, device="cpu", tensor_parallel=16)


def test_without_kernels_nothing_runs():
    done = fusion_pass.warmup(device="cpu", **SIZES)
    assert done.calls == 0 and not done.compiled and "no kernels" in str(done)


@pytest.mark.parametrize("kv, quant, pack", [(form, quant, pack) for form in warm_up.KV_FORMS
                                             for quant, pack in ((None, False), ("fp32", False), ("ue8m0", True))])
def test_every_call_is_valid(kv, quant, pack):
    """The calls run (on the CPU's reference), at every kind of token count, and no call repeats another."""
    chain = warm_up.Chain(heads=8, groups=2, rank=128, max_tokens=3, max_keys=70, kv=(kv,), quant=quant,
                          pack_scales=pack, capacities=((5, 0), (5, 7)), masks=warm_up.MASKS, partials=(2, 3),
                          page_size=4, extra_page_sizes=(2, 4), window=16)
    seen = set()
    for op, args, more in warm_up.calls(chain, torch.device("cpu"), 2):
        for value in args:
            if isinstance(value, torch.Tensor) and value.dtype != torch.bool and value.is_floating_point():
                assert value.shape.numel() >= 0
        result = getattr(torch.ops.fusion_pass, op)(*args, **more)
        assert (result[0] if isinstance(result, tuple) else result).numel()
        seen.add(op)
    family = {"dense": "attention", "gathered": "attention_gathered", "paged_fp8": "attention_paged_fp8",
              "partials": "merge_partials", "opaque": "inverse"}[kv]
    assert seen == {f"{family}{chain.suffix}"} | ({"fp8_bgemm"} if quant else set())


def test_every_row_of_the_tables_is_reached():
    """Token counts up to the last edge: no table has a row that begins above it."""
    edges = {limit for rows in (*bgemm.TILES.values(), *bgemm.INVARIANT.values()) for limit, _ in rows}
    assert max(edges - {bgemm.ANY}) < warm_up.LAST_EDGE
    counts = warm_up.token_counts(10**6, 132)
    assert {1, 264, 512, 513, warm_up.LAST_EDGE, warm_up.LAST_EDGE + 1} <= set(counts) and len(counts) < 320
    for tokens in (1, 3, 17, 132):
        given, reached = (
            {attention.num_splits(tokens, 1, -(-keys // 64), 132) for keys in counts}
            for counts in (range(1, 9000), warm_up.key_counts(tokens, 9000, 132))
        )
        assert given == reached


@pytest.mark.gpu
@pytest.mark.parametrize("kv, quant, masks", [
    ("gathered", "ue8m0", ("none",)), ("paged_fp8", "fp32", ("none",)), ("dense", None, warm_up.MASKS),
    ("opaque", "fp32", ("none",)),
])  # fmt: skip
def test_nothing_compiles_after_it(kv, quant, masks):
    """Serving every number of tokens up to 300, at other numbers of keys than the warm-up's: no compilation."""
    sizes = {"heads": 128, "groups": 16, "kv": (kv,), "quant": quant, "masks": masks, "lengths": (True,)}
    sizes |= {"max_tokens": 300, "max_keys": 640}
    done = fusion_pass.warmup(**sizes)
    # What an earlier case of this process compiled is not compiled again.
    assert done.calls > 300 and sum(done.compiled.values()) >= 1 and not done.refused, str(done)
    device = torch.device("cuda")
    make = warm_up._Operands(done.chain, device)
    weight = factors = None
    if quant:
        weight = make.empty(16, 1024, 4096, dtype=torch.float8_e4m3fn)
        factors = make.empty(16, 8, 32, dtype=torch.float32)
    with warming._compilations() as compiled:
        for tokens in range(1, 301):
            calls = []
            if kv == "dense":
                for keys in (tokens, tokens + 37, 340 + tokens):
                    calls += warm_up._dense(make, tokens, keys)
            elif kv == "opaque":
                args = (make.q(tokens), *make.tables(tokens), 16, *done.chain.quantisation)
                calls.append((f"inverse{done.chain.suffix}", args, {}))
            else:
                for capacity in done.chain.capacities:
                    calls += warm_up._listed(make, tokens, capacity, kv == "paged_fp8")
            if quant:
                calls.append(warm_up._product(make, tokens, weight, factors))
            for op, args, more in calls:
                getattr(torch.ops.fusion_pass, op)(*args, **more)
    torch.cuda.synchronize()
    assert not compiled, compiled
    assert not fusion_pass.warmup(**sizes).compiled
