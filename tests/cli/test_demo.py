"""``python -m fusion_pass demo``: what it chooses on which machine, its judgement, its processes, its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_pass import FusedChain, Report
from fusion_pass.cli import demo, demo_runs
from fusion_pass.cli.console import Progress
from fusion_pass.cli.demo import BF16_ROLES, FP8_ROLES, Phase
from fusion_pass.cli.main import _parser, main

ROOT = Path(__file__).parents[2]


def plan(*words):
    return demo.plan(_parser().parse_args(["demo", *words]))


def test_choices_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = plan()
    assert (chosen.device, chosen.forms, chosen.inner, chosen.tokens, chosen.steps, chosen.size, chosen.experts) == (
        "cpu", ("bf16", "fp8"), "aot_eager", 64, 2, "tiny", "batched_mm")  # fmt: skip
    assert chosen.runs == ("float32", "eager", "compiled") and not chosen.processes
    assert plan("--processes").processes and plan("--form", "fp8").forms == ("fp8",)
    pytest.importorskip("transformers.models.deepseek_v4")
    assert main(["demo", "--device", "cuda"]) == 2 and "no CUDA device" in capsys.readouterr().err


def test_choices_on_a_gpu(monkeypatch):
    """A minute per graph in Inductor: one form, one decode step, one layer of each kind, a process per run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = plan()
    assert (chosen.device, chosen.forms, chosen.inner, chosen.tokens, chosen.steps, chosen.size, chosen.experts) == (
        "cuda", ("bf16",), "inductor", 2048, 1, "flash", "grouped_mm")  # fmt: skip
    assert chosen.runs == ("float32", "eager", "inductor", "compiled") and chosen.processes
    (setting,) = chosen.settings()
    assert setting.phases == ["prefill", "decode 1"] and len(set(setting.layer_types)) == len(setting.layer_types) == 3
    asked = plan("--form", "both", "--steps", "3", "--tokens", "8192", "--no-processes", "--inner", "eager")
    assert (asked.forms, asked.steps, asked.tokens, asked.processes, asked.inner) == (
        ("bf16", "fp8"), 3, 8192, False, "eager")  # fmt: skip
    assert plan("--device", "cpu").size == "tiny"


def run_demo(*words):
    """Result and progress of the command as a user types it; it has to succeed."""
    pytest.importorskip("transformers.models.deepseek_v4")
    command = [sys.executable, "-m", "fusion_pass", "demo", "--device", "cpu", "--json", *words]
    environment = {**os.environ, "NO_COLOR": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    values = json.loads(result.stdout)
    assert values["success"] and not values["complaints"] and values["seconds"] > 1
    return values, result.stderr


def assert_whole(phases, form):
    for phase in phases:
        roles = FP8_ROLES if form == "fp8" else BF16_ROLES
        assert [tuple(chain["roles"]) for chain in phase["report"]["fused"]] == [roles] * 3
        assert not phase["report"]["near_misses"] and not phase["report"]["gated"]
        assert set(phase["seconds"]) == {"eager", "compiled"} and phase["compile_seconds"]["compiled"] > 0


def test_demo():
    values, progress = run_demo("--form", "fp8", "--steps", "1")
    assert [phase["name"] for phase in values["forms"]["fp8"]] == ["prefill", "decode 1"]
    assert_whole(values["forms"]["fp8"], "fp8")
    for line in ("fp8 prefill: compiling with fusion_pass ...", "fp8: timing compiled ..."):
        assert line in progress


@pytest.mark.slow
def test_demo_as_the_readme_runs_it():
    values, _ = run_demo()
    assert list(values["forms"]) == ["bf16", "fp8"]
    for form, phases in values["forms"].items():
        assert [phase["name"] for phase in phases] == ["prefill", "decode 1", "decode 2"]
        assert_whole(phases, form)


def setting(form="bf16", **others):
    values = dict(device="cpu", inner="eager", tokens=8, steps=1, size="tiny", layer_types=("sliding_attention",),
                  experts="batched_mm")  # fmt: skip
    return demo_runs.Setting(form=form, **{**values, **others})


def test_runs_in_processes_of_their_own(capsys):
    pytest.importorskip("transformers.models.deepseek_v4")
    small = setting()
    found = demo_runs.run_in_processes([small], ["float32", "compiled"], Progress())["bf16"]
    assert not found.failures and set(found.runs) == {"float32", "compiled"}
    for number, result in enumerate(found.runs["compiled"]):
        assert [chain.roles for chain in result.report.fused] == [BF16_ROLES]
        reference = found.runs["float32"][number]
        assert result.logits.shape == reference.logits.shape == (1, 1 if number else 8, 512)
        assert demo._error(result.logits, reference.logits) < 0.05, "same weights, same tokens"
        assert 0 < result.seconds < result.first_seconds and not reference.report
    progress = capsys.readouterr().err
    assert "bf16 decode 1: compiling with fusion_pass: " in progress
    assert progress.index("decode 1: float32 reference: ") < progress.index("timing float32 ...")
    assert progress.index("decode 1: compiling with fusion_pass: ") < progress.index("timing float32 ...")


def dies(connection, setting, name):
    connection.send(("begin", name))
    os._exit(7)


def test_a_process_that_dies_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(demo_runs, "_serve", dies)
    found = demo_runs.run_in_processes([setting()], ["eager"], Progress())
    assert found["bf16"].failures == {"eager": "its process ended with exit code 7"} and not found["bf16"].runs
    assert demo._failures("bf16", found["bf16"]) == [
        "bf16: the run 'eager' failed: its process ended with exit code 7"
    ]
    assert "eager: " in capsys.readouterr().err


def test_a_run_that_raises_is_a_failure(monkeypatch, capsys):
    pytest.importorskip("transformers.models.deepseek_v4")
    monkeypatch.setattr(demo_runs.Run, "measure", lambda self: 1 / 0)
    small = setting()
    monkeypatch.setattr(demo.Plan, "settings", lambda self: [small])
    assert main(["demo", "--device", "cpu", "--form", "bf16"]) == 1
    streams = capsys.readouterr()
    assert "PROBLEM: bf16: the run 'compiled' failed: ZeroDivisionError: division by zero" in streams.out
    assert streams.out.endswith("FAILURE\n") and "Traceback" in streams.err


def test_demo_fails_when_nothing_is_fused(monkeypatch, capsys):
    pytest.importorskip("transformers.models.deepseek_v4")
    monkeypatch.setenv("FUSION_PASS_DISABLE", "1")
    small = setting()
    monkeypatch.setattr(demo.Plan, "settings", lambda self: [small])
    assert main(["demo", "--device", "cpu", "--form", "bf16"]) == 1
    text = capsys.readouterr().out
    assert text.endswith("FAILURE\n") and "0 of 1 attention layers fused" in text and "disabled" in text


def phase(roles, eager, compiled, **others):
    chain = FusedChain(roles=roles, op="x")
    values = dict(seconds={}, peak_gib={}, same_tokens=1.0, compile_seconds={}) | others
    return Phase("prefill", Report(fused=[chain] * 3), {"eager": eager, "compiled": compiled}, **values)


def test_demo_judges():
    assert phase(BF16_ROLES, 1e-2, 1e-2).complaints(3, BF16_ROLES) == []
    assert "float32 is 2.00e-01" in phase(BF16_ROLES, 1e-2, 2e-1).complaints(3, BF16_ROLES)[0]
    assert phase(BF16_ROLES, 1e-2, float("nan")).complaints(3, BF16_ROLES), "NaN is no agreement"
    assert "0 of 3" in phase(BF16_ROLES, 1e-2, 1e-2).complaints(3, FP8_ROLES)[0]
    assert "3 of 4" in phase(BF16_ROLES, 1e-2, 1e-2).complaints(4, BF16_ROLES)[0]


def test_time_and_memory_beside_plain_inductor():
    text = demo.against_inductor(phase(BF16_ROLES, 1e-2, 1e-2, seconds={"inductor": 0.023, "compiled": 0.0115},
                                       peak_gib={"inductor": 2.7, "compiled": 2.1}))  # fmt: skip
    assert text == ("prefill: 23.0 ms with plain Inductor, 11.5 ms with fusion_pass (2.00 times as fast); "
                    "peak memory 2.70 and 2.10 GiB")  # fmt: skip
    assert demo.against_inductor(phase(BF16_ROLES, 1e-2, 1e-2)) == ""


def test_progress_says_what_goes_on(capsys):
    progress = Progress()
    progress.begin("one")
    progress.begin("two")
    progress.still_going()
    progress.end("one")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["one ...", "two ..."]
    assert lines[2].startswith("still going: one (0 s), two (0 s)") and lines[3].startswith("one: 0.")
