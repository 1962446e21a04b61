"""The pass in other people's circumstances: other processes, debug switches, autocast, inference mode, nested
regions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_backend import X, compiled, fresh, function, stand_in  # noqa: F401  (fixtures)

import fusion_pass

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys, torch
sys.path.insert(0, {tests!r})
import fusion_pass
from test_backend import X, function, relu_becomes_abs
sys.modules["fusion_pass.rewrite"].run_on_graph = relu_becomes_abs
with torch.no_grad():
    {run}
"""


def process(run, tmp_path, **environment):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(run=run, tests=str(ROOT / "tests"))],
        cwd=tmp_path,  # torch's debug tools leave files in the current folder
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize(
    "how",
    [
        "y = torch.compile(function, backend='fusion_pass')(X)",
        pytest.param("with fusion_pass.enabled(): y = torch.compile(function)(X)", marks=pytest.mark.slow),
    ],
)
def test_another_process_takes_the_code_from_the_cache_and_still_reports(tmp_path, how):
    tell = (
        "from torch._dynamo.utils import counters; r = fusion_pass.reports(); "
        "print(len(r), r[0].fused[0].op, counters['inductor']['fxgraph_cache_hit'], y.tolist())"
    )
    run = f"{how}\n    {tell}"
    assert process(run, tmp_path).stdout.strip() == "1 abs 0 [6.0, 10.0]"
    assert process(run, tmp_path).stdout.strip() == "1 abs 1 [6.0, 10.0]"


def test_torch_logs(tmp_path):
    run = "torch.compile(function, backend='fusion_pass', options={'inner': 'aot_eager'})(X)"
    assert "fused      fmha at user.py:1" in process(run, tmp_path, TORCH_LOGS="+fusion_pass").stderr


def test_structured_trace_holds_report_and_graphs(tmp_path):
    run = "torch.compile(function, backend='fusion_pass', options={'inner': 'aot_eager'})(X)"
    said = process(run, tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    assert "fmha" not in said.stderr, "nobody asked for logs"
    (log,) = (tmp_path / "trace").glob("*.log")
    names = {}
    for line in log.read_text().splitlines():
        if '"artifact"' in line:
            name = json.loads(line[line.index("{") :])["artifact"]["name"]
            names[name] = names.get(name, 0) + 1
    assert [names.get(f"fusion_pass_{part}") for part in ("report", "before", "after")] == [1, 1, 1]


def test_compile_debug(tmp_path):
    run = "print(torch.compile(function, backend='fusion_pass')(X).tolist())"
    environment = dict(TORCH_COMPILE_DEBUG="1", TORCH_COMPILE_DEBUG_DIR=str(tmp_path / "debug"))
    assert process(run, tmp_path, **environment).stdout.strip() == "[6.0, 10.0]"


def test_minifier_settings(tmp_path):
    """Torch's accuracy minifier around the backend; the pass is off, as the stand-in changes the numbers."""
    run = "print(torch.compile(function, backend='fusion_pass', options={'inner': 'aot_eager'})(X).tolist())"
    environment = dict(TORCHDYNAMO_REPRO_AFTER="dynamo", TORCHDYNAMO_REPRO_LEVEL="4", FUSION_PASS_DISABLE="1")
    environment["TORCH_COMPILE_DEBUG_DIR"] = str(tmp_path / "debug")
    assert process(run, tmp_path, **environment).stdout.strip() == "[0.0, 10.0]"


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_inference_mode_and_autocast(stand_in, inner):  # noqa: F811
    run = compiled(inner=inner)
    with torch.inference_mode():
        assert run(X).tolist() == [6.0, 10.0]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(X).tolist() == [6.0, 10.0]
    assert all(len(report.fused) == 1 for report in fusion_pass.reports())


def test_reset(stand_in):  # noqa: F811
    run = compiled(mode="reduce-overhead")
    assert run(X).tolist() == [6.0, 10.0]
    torch.compiler.reset()
    assert run(X).tolist() == [6.0, 10.0] and len(fusion_pass.reports()) == 2


def test_nested_compile_region(stand_in):  # noqa: F811
    region = torch.compiler.nested_compile_region(function)
    run = torch.compile(lambda x: torch.relu(region(x)) + region(x + 1), backend="fusion_pass", fullgraph=True)
    with torch.no_grad():
        expected = (X.abs() * 2).abs() + (X + 1).abs() * 2
        assert run(X).tolist() == expected.tolist()
    assert len(fusion_pass.reports()) == 1, "one report for the compilation, regions included"


def test_frozen_parameters(stand_in):  # noqa: F811
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    run = torch.compile(model, backend="fusion_pass", options={"freezing": True})
    with torch.no_grad():
        torch.testing.assert_close(run(X), model[0](X).abs())
    assert [len(report.fused) for report in fusion_pass.reports()] == [1]


def test_mutated_inputs(stand_in):  # noqa: F811
    def mutating(x):
        x.add_(1)
        return torch.relu(x)

    for inner in ("inductor", "aot_eager", "eager"):
        torch._dynamo.reset()
        x = X.clone()
        run = torch.compile(mutating, backend="fusion_pass", options={"inner": inner})
        assert run(x).tolist() == [2.0, 6.0] and x.tolist() == [-2.0, 6.0]


def test_threads(stand_in):  # noqa: F811
    import threading

    results = {}

    def work(index):
        run = torch.compile(lambda x: torch.relu(x) * index, backend="fusion_pass", options={"inner": "aot_eager"})
        with torch.no_grad():
            results[index] = run(X).tolist()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: [3.0 * index, 5.0 * index] for index in range(4)}
    assert len(fusion_pass.reports()) == 4
