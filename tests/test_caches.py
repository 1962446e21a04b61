"""Caches and threads with a real chain: the same report and numbers from a warm cache and in a new process, never a
graph that was made under other circumstances, several compilations at a time."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import caching_program
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_pass
from fusion_pass import Config, compat

TESTS = Path(__file__).parent
ROLES = ["fmha", "inverse_rope", "bgemm"]


def process(command, file, cache, **environment):
    run = subprocess.run(
        [sys.executable, str(TESTS / "caching_program.py"), command, str(file)], text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(TESTS.parent), "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment})
    assert run.returncode == 0, run.stderr
    return {line["what"]: line for line in map(json.loads, run.stdout.splitlines())}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What the first process said, and torch's cache artifacts of it."""
    folder = tmp_path_factory.mktemp("first")
    return process("save", folder / "artifacts", folder / "cache"), folder / "artifacts"


def roles(line):
    return [chain["roles"] for chain in line["report"][0]]


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_warm_cache_gives_the_same_report_and_numbers(saved, way):
    cold, warm = saved[0][f"{way} 1"], saved[0][f"{way} 2"]
    assert (cold["hits"], cold["misses"]) == (0, 1) and (warm["hits"], warm["misses"]) == (1, 0)
    assert roles(cold) == [ROLES]
    assert warm["report"] == cold["report"] and warm["numbers"] == cold["numbers"]


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    """What a new process says that has only the artifacts."""
    return process("load", saved[1], tmp_path_factory.mktemp("second"))


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_artifacts_in_a_new_process(saved, loaded, way):
    first, second = saved[0][f"{way} 1"], loaded[f"{way} 1"]
    assert (second["hits"], second["misses"]) == (1, 0)
    assert second["report"] == first["report"] and second["numbers"] == first["numbers"]


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_two_configurations_in_one_process(loaded, way):
    other, back = loaded[f"{way} other"], loaded[f"{way} back"]
    assert (other["hits"], other["misses"]) == (0, 1)
    if way == "backend":
        assert not other["report"][0] and "inverse_rope" in other["report"][1][0]["gate"]
    else:
        assert roles(other) == [ROLES], "another bound for merges: the same graph under another key"
    assert (back["hits"], back["misses"]) == (1, 0) and roles(back) == [ROLES]
    assert back["numbers"] == loaded[f"{way} 1"]["numbers"]


@pytest.mark.parametrize("what", ["sources", "_versions"])
def test_another_source_or_torch_is_another_key(loaded, what):
    line = loaded[what]
    assert (line["hits"], line["misses"]) == (0, 1) and roles(line) == [ROLES]


@pytest.mark.slow
def test_environment_is_part_of_the_key(saved, tmp_path):
    lines = process("load", saved[1], tmp_path, FUSION_PASS_DISABLE_RULES="fmha")
    for way in ("backend", "hook"):
        assert (lines[f"{way} 1"]["hits"], lines[f"{way} 1"]["misses"]) == (0, 1)
        assert not lines[f"{way} 1"]["report"][0]


def in_threads(work, count=8):
    """Run ``work(number)`` in as many threads at once; what each returned, or the first exception."""
    results, start = {}, threading.Barrier(count)

    def run(number):
        start.wait()
        try:
            with torch.no_grad():
                results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return [results[number] for number in range(count)]


def variant(number):
    """A model of its own per number: another function, other sizes."""
    def model(*args, number=number):
        return caching_program.layer(*args) * (number + 1)

    return model, caching_program.operands(tokens=3 + number, heads=4 * (1 + number % 3), seed=number)


@pytest.mark.skipif(not compat.supports_pass_lists(),
                    reason="Dynamo of torch 2.11 crashes in several threads, whatever the backend")
def test_eight_threads_compile_different_models():
    torch._dynamo.reset()
    known = len(fusion_pass.reports())

    def work(number):
        model, args = variant(number)
        compiled = torch.compile(model, backend="fusion_pass", fullgraph=True, dynamic=False,
                                 options={"inner": "aot_eager", "strict": True})
        return compiled(*args), model(*args)

    for found, wanted in in_threads(work):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    reports = fusion_pass.reports()[known:]
    assert [[list(chain.roles) for chain in report.fused] for report in reports] == [[ROLES]] * 8


def test_eight_threads_rewrite_different_graphs():
    """Without Dynamo's lock."""
    graphs = []
    for number in range(8):
        model, args = variant(number)
        with torch.no_grad():
            graphs.append((make_fx(model, tracing_mode="fake")(*args), args, model(*args)))

    def work(number):
        graph, args, _ = graphs[number]
        return fusion_pass.rewrite(graph, Config(strict=True)), graph(*args)

    for number, (report, found) in enumerate(in_threads(work)):
        heads = graphs[number][1][0].shape[1]
        assert [list(chain.roles) for chain in report.fused] == [ROLES], report
        assert f"{heads} heads" in report.fused[0].gate
        torch.testing.assert_close(found, graphs[number][2], rtol=1e-4, atol=1e-4)
