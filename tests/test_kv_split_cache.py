"""FUSION_PASS_KV_SPLIT between runs of one program: never the code that was compiled under another setting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fusion_pass.kernels.ops import SPECS
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import fusion_pass

sys.path.insert(0, str(Path(__file__).parent / "graphs"))
import chains  # noqa: E402


@pytest.fixture
def groups(monkeypatch) -> list:
    """The bound of the groups that each call of the merge op got."""
    seen = []
    spec = SPECS["merge_partials_rope"]
    right = spec.reference

    def recording(*args):
        seen.append(args[8])
        return right(*args)

    assert list(spec.signature.parameters)[8] == "kv_split"
    object.__setattr__(spec, "reference", recording)
    yield seen
    object.__setattr__(spec, "reference", right)


def test_another_setting_is_another_key(groups, monkeypatch):
    """A new process would find Inductor's cache on disk; here only Dynamo's memory is dropped, so that the second run
    asks that cache. Same setting: a hit. Another: no hit, and the other bound reaches the op."""
    args = chains.merge_inputs()
    with fresh_cache(), torch.no_grad():
        want = chains.merged(*args)
        for setting, bound, hits in (("4", 4, 0), ("4", 4, 1), ("2", 2, 0), (None, None, 0), ("2", 2, 1), ("4", 4, 1)):
            if setting is None:
                monkeypatch.delenv("FUSION_PASS_KV_SPLIT", raising=False)
            else:
                monkeypatch.setenv("FUSION_PASS_KV_SPLIT", setting)
            torch._dynamo.reset()
            counters.clear()
            groups.clear()
            got = torch.compile(chains.merged, backend="fusion_pass", fullgraph=True)(*args)
            assert groups == [bound], setting
            assert counters["inductor"]["fxgraph_cache_hit"] == hits, setting
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    fusion_pass.clear_reports()
