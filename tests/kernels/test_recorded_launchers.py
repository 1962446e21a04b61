# SPDX-License-Identifier: Apache-2.0
"""Our launchers keep what launch plans ask of them: all launches are observed, and only addresses change."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_machine import FakeKernel, FakeMachine
from fusion_pass.kernels import launching
from fusion_pass.kernels.modes import modes_of, using
from fusion_pass.kernels.ops import SPECS, dispatch
from fusion_pass.kernels.ops.launch_plans import Plan
from fusion_pass.kernels.ops.recording import record
from launch_cases import cases

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (8, 64), (140, 16)])
def test_our_launchers_are_recorded(tokens, heads, monkeypatch):
    """Every launcher of ours in every form that models call: its plan launches for other tensors what it would launch
    for them itself. (Kernels are stand-ins; sizes are those of a GPU with 132 multiprocessors.)"""
    pytest.importorskip("triton")
    assert not dispatch.load_providers()
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    notes, fake = [], FakeMachine()
    kernels: dict[str, FakeKernel] = {}

    def at(kernel, grid, cluster=1):
        stand_in = kernels.setdefault(
            f"{kernel.fn.__module__}.{kernel.fn.__qualname__}", FakeKernel(kernel.arg_names, notes)
        )
        return launching.at(stand_in, grid)

    from fusion_pass.kernels.triton import merge, merge_rows, paged  # noqa: F401  (launchers import them when called)

    package = launching.__name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and getattr(module, "at", None) is launching.at and module is not launching:
            monkeypatch.setattr(module, "at", at)
    done = 0
    for (op, args, modes), (_, others, _) in zip(
        *(cases(tokens, s, heads, 2, "cpu", 128) for s in (0, 1)), strict=True
    ):
        if tokens > 8 and op == "fp8_bgemm" and modes:
            continue
        for launcher in dispatch._launchers[op]:
            if not launcher.replayable:
                continue
            with using(modes_of(**modes)):
                outs = SPECS[op].empty(*args)
                plan = record(fake.machine, args, outs, lambda call=launcher, a=args, o=outs: call.launch(o, *a))
                assert isinstance(plan, Plan), (op, launcher.name, plan)
                notes.clear()
                launcher.launch(outs, *others)
            ordinary = [note[1:] for note in notes]
            notes.clear()
            tensors = [value for value in others if isinstance(value, torch.Tensor)]
            plan.replay(others, [t.data_ptr() for t in tensors], outs)
            known = {t.data_ptr() for t in (*tensors, *outs) if t.numel()}
            assert blurred(ordinary, known) == blurred([note[1:] for note in notes], known), (op, launcher.name)
            done += 1
    assert done > 80 and len(kernels) >= 8


def test_queries_that_start_anywhere():
    """The Hopper kernels copy queries 16 bytes at a time: contiguous ones that start elsewhere are copied first."""
    from fusion_pass.kernels.gluon.attention import _aligned_q

    q = torch.arange(2.0 * 4 * 8 + 1).bfloat16()
    aligned, shifted = q[:-1].view(1, 2, 4, 8), q[1:].view(1, 2, 4, 8)
    assert aligned.data_ptr() % 16 == 0 and _aligned_q(aligned) is aligned
    copied = _aligned_q(shifted)
    assert copied.data_ptr() % 16 == 0 and copied.is_contiguous() and torch.equal(copied, shifted)


def blurred(launched, known):
    """Launches with the addresses of workspaces, which are new at every call, replaced by the order of their use."""
    order: dict[int, int] = {}

    def plain(value):
        if isinstance(value, tuple) and value and value[0] == "map":
            return ("map", plain(value[1]), *value[2:])
        if isinstance(value, int) and value > 1 << 32 and value not in known:
            return ("workspace", order.setdefault(value, len(order)))
        return value

    return [(grid, stream, tuple(map(plain, values))) for grid, stream, values in launched]


def test_every_launch_can_be_observed():
    """No module of the kernels launches but through ``launching.at``: a launch past it would be missing from plans."""
    found = []
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                named = ast.unparse(node.func.value)
                if "kernel" in named or named == "list_visible_keys":
                    found.append(f"{path.name}: {ast.unparse(node.func)}")
    assert not found
    used = [path for path in (ROOT / "kernels").rglob("*.py") if "launching import at" in path.read_text()]
    assert len(used) >= 8
