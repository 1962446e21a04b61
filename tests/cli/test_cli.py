"""The command line as a user runs it, from the root of the checkout: output, streams, exit codes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusion_pass
from fusion_pass.cli.main import main

F64 = torch.float64
ROOT = Path(__file__).parents[2]


def test_version_and_usage_errors(capsys):
    from fusion_pass import __version__

    asked = subprocess.run([sys.executable, "-m", "fusion_pass", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert asked.stdout.strip() == f"fusion_pass {__version__}" and asked.returncode == 0
    for words, complaint in ([], "COMMAND"), (["doctor", "--nonsense"], "--nonsense"):
        with pytest.raises(SystemExit) as error:
            main(words)
        assert error.value.code == 2 and complaint in capsys.readouterr().err


def test_doctor(monkeypatch, capsys):
    monkeypatch.setenv("FUSION_PASS_KV_SPLIT", "4")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("all self-tests passed\n") and "FUSION_PASS_KV_SPLIT: 4" in text
    assert main(["doctor", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["success"] and values["backend"] == "registered" and values["packages"]["torch"]
    assert "sm_" in values["gates"]["implementation"] or "reference path" in values["gates"]["implementation"]
    assert set(values["ops"]) == set(fusion_pass.kernels.ops.SPECS), "a self-test for every op"


def test_doctor_notices_a_wrong_op(monkeypatch, capsys):
    wrong = torch.ops.fusion_pass.attention
    monkeypatch.setattr(
        torch.ops.fusion_pass, "attention", lambda q, *rest: wrong(q * (1 + (q.dtype != F64) / 8), *rest)
    )
    monkeypatch.setattr(torch.ops.fusion_pass, "inverse_rope", lambda *args: 1 / 0)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "attention: FAILED" in text and "inverse_rope: FAILED, none (ZeroDivisionError" in text
    assert text.endswith("2 self-tests failed: attention, inverse_rope\n")


def test_doctor_tests_every_kernel_that_could_run(monkeypatch, capsys):
    """Also those that stand behind the one that is taken: another size or type takes them."""
    spec = fusion_pass.kernels.ops.SPECS["inverse_rope"]

    def launch(factor):
        return lambda outs, *args: outs[0].copy_(spec.reference(*args) * factor)

    dispatch = fusion_pass.kernels.ops.dispatch
    kernels = [dispatch.Launcher("good", lambda *args: None, launch(1)),
               dispatch.Launcher("bad", lambda *args: None, launch(2))]
    monkeypatch.setattr(dispatch, "applicable", lambda op, args: kernels if op == "inverse_rope" else [])
    assert main(["doctor", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    outcome = values["ops"]["inverse_rope"]
    assert outcome["kernel"] == "reference" and outcome["error"] < 0.02 and not outcome["ok"]
    assert outcome["others"]["good"] < 0.02 and outcome["others"]["bad"] > 0.9
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "inverse_rope: FAILED" in text and "; bad 1.0e+00" in text and "1 self-tests failed" in text


def test_explain_target(tmp_path, capsys):
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "def small():\n    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)\n"
        "def keyword():\n    return torch.nn.Linear(4, 4), (), {'input': torch.randn(2, 4)}\n"
        "def wrong():\n    return torch.nn.Linear(4, 4)\n"
    )
    file = tmp_path / "model.py"
    assert main(["explain", f"{file}:small", "--json"]) == 1, "an ordinary linear: nothing to fuse"
    values = json.loads(capsys.readouterr().out)
    assert values["graphs"] == 1 and not values["fused"] and not values["near_misses"]
    assert main(["explain", f"{file}:keyword"]) == 1 and "0 fused" in capsys.readouterr().out
    for target, message in [
        (f"{file}:wrong", "should return (model, args)"),
        (f"{file}:absent", "has no function 'absent'"),
        (f"{tmp_path / 'absent.py'}:f", "no file"),
        ("absent_module:f", "cannot import absent_module"),
        ("model", "expected MODULE:FUNCTION"),
    ]:
        assert main(["explain", target]) == 2
        streams = capsys.readouterr()
        assert message in streams.err and not streams.out


def test_explain_module_in_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "a_model.py").write_text("import torch\ndef f():\n    return torch.relu, (torch.ones(2),)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["explain", "a_model:f", "--dynamic"]) == 1 and "1 graph" in capsys.readouterr().out


def test_bench_passes_its_arguments_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT])
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["bench", "chain"]) == 2 and "source checkout" in capsys.readouterr().err
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "__main__.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    importlib.invalidate_caches()
    assert main(["bench", "chain", "--quick"]) == 3 and "['chain', '--quick']" in capsys.readouterr().out
