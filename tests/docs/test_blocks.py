"""Generated blocks of README.md and docs/ are what this code makes."""

import json
from pathlib import Path

import pytest
import torch
from tool_modules import load_tool

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def tool():
    return load_tool("docs_blocks")


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


def test_sentences_about_results(tool, tmp_path, monkeypatch):
    """Every figure in them is one of the files'."""
    monkeypatch.setattr(tool, "RESULTS", tmp_path)

    def write(name, rows, **environment):
        made = {"gpu": "Some GPU", "torch": "2.x", "triton": "3.x", "time": "2026-12-01T01:02:03Z", **environment}
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": made, "rows": rows}))

    assert tool.BLOCKS["how-fast"]() == "" and "No decode steps" in tool.BLOCKS["decode-step"]()
    chain = [{"shape": "pro", "T": t, "variant": f"{who}, {kv} KV", "us": us, "quantisation": "vLLM"}
             for t, who, kv, us in [(1, "fusion_pass", "bf16", 10), (1, "peers", "bf16", 15), (1, "peers", "FP8", 11),
                                    (1, "fusion_pass", "FP8", 10), (8, "fusion_pass", "bf16", 20),
                                    (8, "peers", "bf16", 25)]]  # fmt: skip
    write("chain", chain, vllm="1.2", kernels="0123abcd")
    write("bgemm", [], kernels="0123abcd")
    write("rope_quant", [{"shape": "pro", "T": 64, "variant": "vLLM", "us": 3.0, "ratio": 0.9}])
    assert "1.25 to 1.50 times as long (bf16 keys) and 1.10 to 1.10" in tool.BLOCKS["how-fast"]()
    assert "torch's own" not in tool.BLOCKS["how-fast"]()
    slow = [("unfused", 1, 100), ("unfused", 8, 300), ("Inductor", 1, 40), ("Inductor", 8, 100)]
    torchs = [{"shape": "pro", "T": t, "variant": f"torch, {name}", "us": us} for name, t, us in slow]
    write("chain", [*chain, *torchs], vllm="1.2", kernels="0123abcd")
    text = tool.BLOCKS["how-fast"]().replace("\n", " ")
    assert "it takes 10.0 to 15.0 times as long, compiled by plain Inductor 4.0 to 5.0." in text
    text = tool.BLOCKS["sources"]().replace("\n", " ")
    assert "`bgemm.json`, `chain.json`: 2026-12-01, kernels 0123abcd; `rope_quant.json`: 2026-12-01, ker" in text
    assert "used vLLM's quantisation kernel (1.2)." in text
    write("chain", [{**row, "quantisation": "stand-in"} for row in chain])
    assert "a stand-in" in tool.BLOCKS["how-fast"]() and "kernel at 64 tokens" in tool.BLOCKS["sources"]()

    host = [("flash: a", "ordinary launches", 200.4), ("flash: b", "ordinary launches", 300.0), ("pro: a", "one", 1.0),
            ("flash: a", "replay of a launch plan", 30.0), ("flash: b", "first call of a form", 900.0),
            ("flash: torch.bmm", "one kernel", 15.0)]  # fmt: skip
    write("host", [*({"shape": s, "T": 1, "variant": v, "us": us} for s, v, us in host),
                   {"shape": "flash: b", "T": 1, "variant": "replay of a launch plan", "us": None, "failed": "why"}])
    text = tool.BLOCKS["how-fast"]().replace("\n", " ")
    assert "costs 30 us" in text and "200 to 300 where" in text and "900 at the first call" in text
    assert text.endswith("bmm` 15. Decode under CUDA graphs.")
    assert tool.benchmarks("host").endswith("1 more cases failed, as the JSON says.")

    profile = {"attention and merge": 0.0, "everything else": 100.0}
    step = {"batch": 1, "T": 1, "shape": "flash decode, captured", "way": "captured", "kernels": 9}
    write("decode_graphs", [
        {**step, "variant": "inductor", "ms": 2.0, "us": 2e3, "kernel_us": 100.0, "profile": profile},
        {**step, "variant": "fusion_pass", "ms": 1.5, "us": 1.5e3, "kernel_us": 60.0, "relative_to_inductor": 0.75,
         "profile": {"attention and merge": 15.0, "everything else": 45.0}}])  # fmt: skip
    text = tool.BLOCKS["decode-step"]().replace("\n", " ")
    assert "takes 0.75 of plain" in text and "are 75% of the sum" in text and "that sum is 0.45 of plain" in text
    assert "| 1 | fusion_pass | 9 | 60.0 | 15.0 | 45.0 |" in text


def test_figures_beside_the_peers(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    blocks = ("measured-attention", "measured-pages", "measured-product", "measured-rotation")
    assert {tool.BLOCKS[name]() for name in blocks} == {"No figures are committed."}

    def write(name, **times):
        rows = [{"shape": shape, "T": 64, "variant": variant, "us": us, "ratio": 1.5,
                 "vLLM / this": 2.25} for variant, us in times.items() for shape in ("pro", "flash")]  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": {}, "rows": rows}))

    ours = "fusion_pass, {}inverse RoPE + FP8"
    write("attention", **{ours.format(""): 40.0, ours.format("FP8 KV, "): 53.5, "FlashMLA, bf16 KV": 42.0})
    assert "epilogue: 1.05 at 64 tokens" in tool.BLOCKS["measured-attention"]().replace("\n", " ")
    assert "by 13.5 us at 64 tokens" in tool.BLOCKS["measured-pages"]().replace("\n", " ")
    write("bgemm", fusion_pass=20.0, DeepGEMM=21.5)
    assert "20.0 us at 64 (21.5) tokens of 128 heads" in tool.BLOCKS["measured-product"]().replace("\n", " ")
    write("rope_quant", default=5.2, vLLM=11.7)
    assert "5.2 us at 64 (1.50, 2.25) tokens of 128 heads" in tool.BLOCKS["measured-rotation"]().replace("\n", " ")
