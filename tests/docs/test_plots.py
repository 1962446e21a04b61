"""The committed plots are of the committed results."""

from pathlib import Path

import pytest
from tool_modules import load_tool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plots():
    return load_tool("plots")


def test_committed_plots_are_current(plots):
    for name in (plots.RATIOS, *plots.LINES):
        text = (plots.PLOTS / f"{name}.svg").read_text()
        assert f"{name}.json {plots.digest(name)}" in text, f"{name}.svg is stale: python tools/plots.py"
    shown = (ROOT / "README.md").read_text()
    assert "docs/plots/chain.svg" in shown
    shown = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"plots/{path.name}" in shown for path in plots.PLOTS.glob("*.svg"))


def test_ratios(plots):
    """Only rows with a peer over the same kind of keys, and of ours only the one with our own product."""
    times = {
        ("pro", 1, "fusion_pass, bf16 KV"): 20.0,
        ("pro", 1, "peers, bf16 KV"): 30.0,
        ("pro", 1, "fusion_pass, FP8 KV"): 25.0,
        ("pro", 8, "fusion_pass, bf16 KV"): 40.0,
        ("pro", 8, "fusion_pass, bf16 KV, DeepGEMM product"): 30.0,
        ("pro", 8, "peers, bf16 KV"): 50.0,
    }
    rows = [{"shape": s, "T": t, "variant": v, "us": us} for (s, t, v), us in times.items()]
    assert plots.ratios(rows) == {"pro": {"bf16": [(1, 1.5), (8, 1.25)]}}


def test_plots_can_be_drawn(plots, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "PLOTS", tmp_path)
    monkeypatch.setattr(plots, "ROOT", tmp_path)
    plots.main()
    assert {path.stem for path in tmp_path.glob("*.svg")} == {plots.RATIOS, *plots.LINES}
