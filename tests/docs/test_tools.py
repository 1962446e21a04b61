"""Tools that run for minutes elsewhere: what they keep, and that their commands are the README's."""

import json
from pathlib import Path

import pytest
from tool_modules import load_tool

ROOT = Path(__file__).parents[2]


def test_versions_are_kept_once(tmp_path, monkeypatch):
    tool = load_tool("version_matrix")
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "versions.json")
    row = {"torch": "2.13.0", "transformers": "5.24.0", "device": "cpu", "tests": ["tests"], "passed": 1}
    inside = {"tests": ["tests/graphs/test_a.py::test_b"]}
    for other in ({}, {"passed": 2}, {"torch": "2.11.0"}, inside, {"tests": ["tests/graphs"]}):
        tool.record(row | other)
    kept = json.loads((tmp_path / "versions.json").read_text())
    assert [(r["torch"], r["tests"], r["passed"]) for r in kept] == [
        ("2.11.0", ["tests"], 1), ("2.13.0", ["tests"], 2), ("2.13.0", ["tests/graphs"], 1)]  # fmt: skip
    tool.record(row | {"passed": 3})
    kept = json.loads((tmp_path / "versions.json").read_text())
    assert [(r["torch"], r["passed"]) for r in kept] == [("2.11.0", 1), ("2.13.0", 3)], "the whole suite, later"


def test_versions_come_in_pairs(capsys):
    with pytest.raises(SystemExit):
        load_tool("version_matrix").main(["--torch", "2.11.0"])
    assert "go together" in capsys.readouterr().err


def test_newcomers_take_the_commands_of_the_readme(tmp_path):
    readme = (ROOT / "README.md").read_text()
    steps = load_tool("newcomer").steps(tmp_path)
    for what in ('pip install -e ".[hf]"', "python -m fusion_pass demo",
                 "python -m fusion_pass explain examples/plain_attention.py:example"):
        assert what in readme and what in [step for step, _ in steps]


def test_fuzz_counts_are_kept(tmp_path, monkeypatch):
    import fuzzing

    monkeypatch.setenv("FUSION_PASS_FUZZ_RECORD", str(tmp_path / "fuzz.json"))
    monkeypatch.setattr(fuzzing, "COUNTS", fuzzing.Counter(something=3))
    written = []
    fuzzing.report(written.append)
    assert "something 3" in written[0]
    assert json.loads((tmp_path / "fuzz.json").read_text())["something"]["cases"] == 3
