# SPDX-License-Identifier: Apache-2.0
"""The decisions of choose_kv_split as a table. Pure host code: no GPU, no Triton."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fusion_pass.kernels import reduction
from fusion_pass.kernels.reduction import KV_SPLITS, cap_bound, choose_kv_split, for_blocks


def choose(num_partials, rows, bound, head_dim=512, sm_count=132):
    return choose_kv_split(
        num_partials=num_partials, rows=rows, head_dim=head_dim, sm_count=sm_count, bound=bound
    )


# (partials, rows, head_dim, SMs, bound) -> (KvSplit, words of the reason)
TABLE = [
    # The bound itself, where nothing is in the way.
    ((64, 128, 512, 132, 1), (1, "serial")),
    ((64, 128, 512, 132, 2), (2, "fits")),
    ((64, 128, 512, 132, 4), (4, "fits")),
    ((64, 128, 512, 132, 8), (8, "fits")),
    ((64, 128, 256, 132, 16), (16, "fits")),
    # Every group has a partial.
    ((1, 128, 512, 132, 8), (1, "2 groups but 1 partial")),
    ((2, 128, 512, 132, 16), (2, "4 groups but 2 partials")),
    ((3, 128, 512, 132, 8), (2, "4 groups but 3 partials")),
    ((7, 128, 512, 132, 8), (4, "8 groups but 7 partials")),
    ((8, 128, 512, 132, 8), (8, "fits")),
    # Every group holds a whole row: 512 threads of 8 channels are 8 rows of 512.
    ((64, 16, 512, 132, 16), (8, "a row 512")),
    ((64, 16, 1024, 132, 16), (4, "a row 1024")),
    ((64, 16, 4096, 132, 16), (1, "a row 4096")),
    ((64, 16, 128, 132, 16), (16, "fits")),
    # The grid fits 2 x SMs: 16 CTAs per token of 128 heads, times KvSplit.
    ((64, 256, 512, 132, 8), (8, "fits")),
    ((64, 512, 512, 132, 8), (4, "512 CTAs exceeds 2 x 132")),
    ((64, 1024, 512, 132, 8), (2, "exceeds 2 x 132")),
    ((64, 2048, 512, 132, 8), (1, "exceeds 2 x 132")),
    ((64, 264 * 8, 512, 132, 2), (1, "exceeds")),
    ((64, 132 * 8, 512, 132, 2), (2, "fits")),
    ((64, 132 * 8 + 1, 512, 132, 2), (1, "265 CTAs exceeds 2 x 132")),
    ((64, 128, 512, 16, 8), (2, "exceeds 2 x 16")),
    ((64, 64, 512, 4, 8), (1, "exceeds 2 x 4")),
]


@pytest.mark.parametrize("sizes,expected", TABLE, ids=[str(sizes) for sizes, _ in TABLE])
def test_explicit_bound(sizes, expected):
    num_partials, rows, head_dim, sm_count, bound = sizes
    decision = choose(num_partials, rows, bound, head_dim, sm_count)
    assert decision.kv_split == expected[0], decision.reason
    assert expected[1] in decision.reason


@pytest.mark.parametrize("bound", [0, -1, 3, 5, 32, 64])
def test_bound_outside_the_set(bound):
    with pytest.raises(ValueError, match="expected bound"):
        choose(64, 128, bound)


@pytest.mark.parametrize("wrong", [{"num_partials": 0}, {"rows": -1}, {"head_dim": 0}, {"sm_count": -1}])
def test_impossible_sizes(wrong):
    sizes = {"num_partials": 4, "rows": 128, "head_dim": 512, "sm_count": 132, "bound": 4}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        choose_kv_split(**{**sizes, **wrong})


@pytest.mark.parametrize("bound", KV_SPLITS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 512])
def test_explicit_bound_properties(bound, head_dim):
    for num_partials, rows in itertools.product([1, 2, 3, 5, 17, 64, 257], [1, 64, 128, 1000, 8192]):
        check_explicit_bound(bound, num_partials, rows, head_dim)


def check_explicit_bound(bound, num_partials, rows, head_dim):
    decision = choose(num_partials, rows, bound, head_dim)
    assert decision.kv_split in KV_SPLITS and decision.kv_split <= bound
    assert decision.kv_split <= num_partials
    assert reduction.grid_ctas(decision.kv_split, rows=rows, head_dim=head_dim) <= 264 or decision.kv_split == 1
    # A larger bound never gives fewer groups.
    if bound > 1:
        assert choose(num_partials, rows, bound // 2, head_dim).kv_split <= decision.kv_split
    assert head_dim % decision.width == 0 and decision.width & (decision.width - 1) == 0
    assert decision.num_warps in (1, 2, 4, 8) and decision.unroll >= 1


@pytest.mark.parametrize("sm_count,capability", [(0, None), (108, None), (148, None), (132, (10, 0))])
def test_serial_where_nothing_was_measured(sm_count, capability):
    decision = choose_kv_split(
        num_partials=128, rows=128, head_dim=512, sm_count=sm_count, bound=None, capability=capability
    )
    assert decision.kv_split == 1 and f"nothing was measured for {sm_count} SMs" in decision.reason


def test_serial_for_a_head_dim_that_was_not_measured():
    decision = choose(128, 128, None, head_dim=256)
    assert decision.kv_split == 1 and "nothing was measured" in decision.reason


class FakeTable:
    """A measured table of two row counts: KvSplit wins at few rows and many partials."""

    DEVICE, HEAD_DIM, PDL_MAX_ROWS = "a test", 512, 128
    POINTS = {
        128: {
            4: {1: (1.7, 256, 1, 8, 18), 2: (1.8, 128, 1, 4, 16)},
            64: {1: (5.6, 128, 1, 8, 18), 2: (4.9, 128, 1, 8, 0), 8: (4.4, 256, 2, 2, 0), 16: (5.1, 512, 8, 1, 0)},
        },
        2048: {64: {1: (63.5, 512, 4, 8, 18), 8: (63.8, 512, 4, 1, 0)}},
    }

    @classmethod
    def measured(cls, element_size, epilogue):
        return cls.POINTS if element_size == 4 else {}


@pytest.fixture
def fake_table(monkeypatch):
    monkeypatch.setattr(reduction, "measured_table", lambda sm_count, capability=None: FakeTable)


@pytest.mark.parametrize(
    "num_partials,rows,kv_split,width",
    [
        (64, 128, 8, 256),  # a measured point: its fastest entry
        (50, 100, 8, 256),  # nearest by ratio
        (64, 500, 8, 256),  # 500 is nearer to 128 than to 2048 by ratio
        (64, 600, 1, 512),
        (4, 128, 1, 256),  # serial is fastest
        (3, 128, 1, 256),
        (500, 8192, 1, 512),
    ],
)
def test_no_bound_takes_the_measured_table(fake_table, num_partials, rows, kv_split, width):
    decision = choose(num_partials, rows, None)
    assert (decision.kv_split, decision.width) == (kv_split, width), decision.reason
    assert "measured on a test" in decision.reason
    assert ("warps, not CTAs" in decision.reason) == (kv_split > 1) and ("serial" in decision.reason)
    assert decision.pdl == (rows <= 128)


def test_table_never_gives_a_group_without_a_partial(fake_table):
    # 17 partials are nearest to the point of 64, whose KvSplit 8 is fine; 16 groups would not be for 15.
    for num_partials in range(1, 40):
        assert choose(num_partials, 128, None).kv_split <= num_partials


def test_bound_takes_its_layout_from_the_table(fake_table):
    decision = choose(64, 128, 8)
    assert (decision.kv_split, decision.width, decision.num_warps) == (8, 256, 2) and "fits" in decision.reason
    assert choose(64, 128, 2).width == 128
    # not measured there: the layout by rule
    assert choose(64, 2048 // 2, 2).kv_split == 2


def test_unmeasured_element_size_is_serial(fake_table):
    decision = choose_kv_split(num_partials=64, rows=128, head_dim=512, sm_count=132, bound=None, element_size=2)
    assert decision.kv_split == 1 and "2-byte partials" in decision.reason


def test_the_shipped_table():
    """Every measured point: the policy picks its fastest entry, and every layout in it can be launched."""
    table = reduction.measured_table(132, (9, 0))
    assert table is not None and table.HEAD_DIM == 512
    for element_size, epilogue in table.MEASURED:
        for rows, by_partials in table.measured(element_size, epilogue).items():
            for num_partials, by_split in by_partials.items():
                decision = choose_kv_split(
                    num_partials=num_partials,
                    rows=rows,
                    head_dim=512,
                    sm_count=132,
                    bound=None,
                    element_size=element_size,
                    epilogue=epilogue,
                )
                chosen, best = by_split[decision.kv_split][0], min(entry[0] for entry in by_split.values())
                assert chosen * (1 - reduction.NOISE) <= best and chosen <= by_split[1][0]
                assert decision.kv_split == 1 or chosen < by_split[1][0]
                for kv_split, (us, width, warps, unroll, limit, *batch) in by_split.items():
                    assert kv_split in KV_SPLITS and us > 0 and 512 % width == 0 and warps in (1, 2, 4, 8)
                    assert unroll >= 1 and limit >= 0 and width >= 128 and all(0 < b <= limit for b in batch)


def test_cap():
    assert cap_bound(None, None) is None
    assert cap_bound(8, None) == 8 and cap_bound(None, 4) == 4
    assert cap_bound(8, 2) == 2 and cap_bound(2, 8) == 2 and cap_bound(16, 1) == 1


def test_tile_covers_whole_quantisation_blocks():
    decision = choose(4, 128, 1, head_dim=512)
    narrow = for_blocks(replace(decision, width=64), 128, 512, 4)
    assert narrow.width == 128 and narrow.num_warps == 1
    assert for_blocks(decision, 32, 512, 4) == decision


def test_policy_needs_neither_triton_nor_a_device():
    code = (
        "import sys; sys.modules['triton'] = None; from fusion_pass.kernels.reduction import choose_kv_split; "
        "choose_kv_split(num_partials=18, rows=128, head_dim=512, sm_count=132, bound=None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shipped_table_against_the_committed_measurements():
    """At every measured point of the merge table the policy takes a form within 5 % of the best one, and no slower
    than the best serial form."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "merge.json"
    points: dict[tuple, dict[str, float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        points.setdefault((row["T"], row["partials"], row["epilogue"]), {})[row["variant"]] = row["us"]
    assert len(points) > 50
    for (tokens, partials, epilogue), times in points.items():
        chosen = choose_kv_split(num_partials=partials, rows=tokens * 128, head_dim=512, sm_count=132,
                                 capability=(9, 0), epilogue=epilogue).kv_split
        serial = times["serial, best"]
        forms = {1: serial} | {int(name.split()[1]): us for name, us in times.items() if name.startswith("KvSplit")}
        assert forms[chosen] <= 1.05 * min(forms.values()), (tokens, partials, epilogue, chosen, forms)
        assert forms[chosen] <= serial, (tokens, partials, epilogue, chosen, forms)
