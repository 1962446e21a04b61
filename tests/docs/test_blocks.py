"""Generated blocks of README.md and docs/ are what this code makes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("docs_blocks", ROOT / "tools" / "docs_blocks.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_committed_blocks_are_current(tool):
    made = {}
    if not torch.__version__.startswith(tool.MADE_WITH):
        # Traced graphs differ from torch to torch: keep what stands there.
        for page in PAGES:
            made |= {name: body.removesuffix("\n") for _, name, body in tool.bodies(page.read_text())
                     if name in ("graph", "report")}
    for page in PAGES:
        text = page.read_text()
        assert tool.filled(text, made) == text, f"{page.name} is stale: python tools/docs_blocks.py"
    assert set(tool.BLOCKS) <= set(made), "every block is used"


def test_stale_block_is_noticed(tool):
    text = "a\n<!-- begin roles (generated) -->\nold\n<!-- end roles -->\nb\n"
    new = tool.filled(text, {})
    assert "old" not in new and "`inverse_rope`" in new and new.startswith("a\n") and new.endswith("b\n")
    with pytest.raises(KeyError):
        tool.filled("<!-- begin nonsense -->\n<!-- end nonsense -->", {})


def test_result_tables(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    assert "No results are committed" in tool.benchmarks()
    env = {"gpu": "Some GPU", "torch": "2.x", "triton": "3.x"}
    rows = [{"shape": "pro", "T": t, "variant": v, "us": us} for t, v, us in
            [(1, "ours", 20.04), (1, "peer", 30.0), (8, "ours", 25.5)]]
    (tmp_path / "chain.json").write_text(json.dumps({"benchmark": "chain", "environment": env, "rows": rows}))
    (tmp_path / "model.json").write_text(json.dumps(
        {"benchmark": "model", "environment": env, "rows": [{"tokens": 2048, "ms": 17.8, "note": "a|b"}]}))
    text = tool.benchmarks()
    assert "| pro | 1 | 20.0 | 30.0 |" in text and "| pro | 8 | 25.5 |  |" in text and "Some GPU" in text
    assert "| 2048 | 17.8 | a\\|b |" in text
    assert "model" not in tool.benchmarks("chain")
    runs = [{"shape": "prefill", "T": 8, "variant": v, "ms": ms, "peak_gib": 1.5, "us": ms * 1e3, **more}
            for v, ms, more in [("eager", 9.0, {}), ("ours", 4.0, {}), ("ours", 3.0, {"note": "an earlier run"})]]
    (tmp_path / "model.json").write_text(json.dumps({"benchmark": "model", "environment": env, "rows": runs}))
    text = tool.benchmarks("model")
    assert "| prefill | 8 | 9.0 ms, 1.50 GiB | 4.0 ms, 1.50 GiB |" in text, "no figure hides another"
    assert "| prefill (1) | 8 |  | 3.0 ms, 1.50 GiB |" in text and text.endswith("(1) an earlier run")
