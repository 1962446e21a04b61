"""Every example is run, and fuses what it says."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache

import fusion_pass

EXAMPLES = Path(__file__).parents[2] / "examples"
CHAIN = ("fmha", "inverse_rope", "bgemm")


@pytest.fixture
def example(monkeypatch):
    """Import an example as a user's script would be: its folder first on the path."""
    monkeypatch.syspath_prepend(EXAMPLES)
    torch._dynamo.reset()
    yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)
    for one in fusion_pass.registered_patterns():
        fusion_pass.unregister_pattern(one.name)


def differences(text):
    return [float(number) for number in re.findall(r"largest difference[^\n]*? ([\d.]+e[-+]\d+)", text)]


def test_from_scratch_in_three_spellings(example, capsys):
    reports = example("from_scratch").main()
    assert [[chain.roles for chain in report.fused] for report in reports] == [[CHAIN]] * 3, reports
    assert not any(report.gated or report.near_misses for report in reports), reports
    found = differences(capsys.readouterr().out)
    assert len(found) == 3 and max(found) < 1e-5


def test_registered_pattern(example, capsys):
    report = example("registered_pattern").main()
    assert [chain.roles for chain in report.fused] == [CHAIN], report
    assert any("registered pattern my_rotation" in note and note.endswith("fused") for note in report.notes)
    assert max(differences(capsys.readouterr().out)) < 1e-5


def test_hand_built_graph(example, capsys):
    report = example("hand_built_graph").main()
    assert [chain.roles for chain in report.fused] == [CHAIN], report
    text = capsys.readouterr().out
    assert "fusion_pass.attention_rope" in text and "_softmax" not in text
    assert max(differences(text)) < 1e-5


def test_inductor_custom_pass(example, capsys):
    with fresh_cache():
        report, theirs = example("inductor_custom_pass").main()
    assert [chain.roles for chain in report.fused] == [CHAIN], report
    assert theirs.seen == [3], "queries with keys, weights with values, projection: the graph before the fusion"
    assert max(differences(capsys.readouterr().out)) < 5e-2


def test_transformers_fp8(example):
    pytest.importorskip("transformers", minversion="5.8")
    model, args, kwargs = example("transformers_fp8").example()
    with torch.no_grad():
        report = fusion_pass.explain(model)(*args, **kwargs)
    assert [chain.roles for chain in report.fused] == [("fmha", "inverse_rope", "fp8_quant", "bgemm")] * 3, report
    (graph,) = report.details
    for part, (flops, traffic) in graph.shares_outside().items():
        assert 0.005 < flops < 0.6 and 0.001 < traffic < 0.9, f"{part}: real modules are told apart"


def test_every_example_is_run_by_a_test():
    tests = [path.read_text() for path in EXAMPLES.parent.glob("tests/**/test_*.py")]
    for path in EXAMPLES.glob("*.py"):
        assert any(path.stem in text for text in tests), f"{path.name} is in no test"
