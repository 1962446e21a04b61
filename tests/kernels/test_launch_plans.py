# SPDX-License-Identifier: Apache-2.0
"""Recording and replaying launches without a GPU: where pointers come from, what makes a call not replayable, when a
plan is dropped. Kernels and machine are stand-ins (fake_machine.py); the launches' effect is tested on a GPU."""

from __future__ import annotations

import gc
import os
from ctypes import c_double, c_float, c_int32
from types import SimpleNamespace

import pytest
import torch
from fake_machine import STREAM, FakeKernel, FakeMachine, descriptor
from fusion_pass.kernels import launching
from fusion_pass.kernels.modes import OFF
from fusion_pass.kernels.ops import Launcher, decisions, dispatch
from fusion_pass.kernels.ops.launch_plans import MAPS, Plan
from fusion_pass.kernels.ops.recording import LAUNCHES, WORKSPACE_BYTES, record

ops = torch.ops.fusion_pass
NAMES = ["a", "b", "c", "size"]


def recorded(launch, *args, outs=None, fake=None):
    """(plan or reason, notes of the recorded call, kernel, machine, outs) of ``launch(kernel, outs, *args)``."""
    fake = fake or FakeMachine()
    kernel = FakeKernel(NAMES)
    outs = outs or (torch.empty(4, 4),)
    found = record(fake.machine, args, outs, lambda: launch(kernel, outs, *args))
    return found, kernel.notes, kernel, fake, outs


def replayed(plan, kernel, *args, outs=None):
    """(results, what the kernel was launched with)."""
    kernel.notes.clear()
    addresses = [value.data_ptr() for value in args if isinstance(value, torch.Tensor)]
    assert plan.fits(addresses)
    result = plan.replay(args, addresses, outs)
    return result, [note[1:] for note in kernel.notes]


def test_pointers_follow_their_tensors():
    """Inputs, results and workspaces of every call; everything else is repeated."""
    spaces = []

    def launch(kernel, outs, x, scale, y):
        middle = torch.empty(3, 5, dtype=torch.float16)
        spaces.append(middle.data_ptr())
        launching.at(kernel, (7, 2))(x, y.view(-1), middle, size=x.shape[0])
        launching.at(kernel, (1,))(middle, None, outs[0].view(torch.uint8), size=scale)

    x, y = torch.ones(6, 2), torch.ones(3)
    plan, notes, kernel, _, outs = recorded(launch, x, 0.5, y)
    assert isinstance(plan, Plan) and not plan.same
    assert notes == [
        ("ordinary", (7, 2), STREAM, (x.data_ptr(), y.data_ptr(), spaces[0], 6)),
        ("ordinary", (1,), STREAM, (spaces[0], None, outs[0].data_ptr(), 0.5)),
    ]
    held = []
    for _ in range(3):
        others = torch.zeros(6, 2), 0.5, torch.zeros(3)
        result, launched = replayed(plan, kernel, *others)
        held.append((others, result))
        space = launched[0][2][2]
        assert launched == [
            ((7, 2), STREAM, (others[0].data_ptr(), others[2].data_ptr(), space, 6)),
            ((1,), STREAM, (space, None, result.data_ptr(), 0.5)),
        ]
        assert (result.shape, result.stride(), result.dtype) == ((4, 4), (4, 1), torch.float32)
        assert space not in (result.data_ptr(), others[0].data_ptr(), others[2].data_ptr()) and space % 16 == 0
    given = torch.empty(4, 4)
    result, launched = replayed(plan, kernel, *held[0][0], outs=(given,))
    assert result is given and launched[1][2][2] == given.data_ptr()


def test_workspaces_do_not_overlap():
    def launch(kernel, outs, x):
        first, second = x.new_empty(1000), torch.empty_like(x)
        launching.at(kernel, (1,))(first, second, torch.empty(0), 1)

    plan, _, kernel, _, _ = recorded(launch, torch.ones(300))
    _, ((_, _, (first, second, empty, _)),) = replayed(plan, kernel, torch.ones(300))
    assert empty == 0 and abs(first - second) >= (4000 if first < second else 1200)


def values(kind, address, count):
    """What lies at an address: a tensor made for a replay lives until everything is launched."""
    return list((kind * count).from_address(address))


def test_cleared_and_derived_tensors():
    """Zeroed flags and copies of arguments are made anew: from the call's own data, in the recorded view."""

    def launch(kernel, outs, x, table):
        flags = torch.zeros(5, dtype=torch.int32)
        rows = x.t().contiguous()
        wide = table.repeat(3, 1).to(torch.float64)
        launching.at(kernel, (1,))(rows, wide, flags, 1)

    plan, _, kernel, _, _ = recorded(launch, torch.zeros(2, 3), torch.zeros(1, 2))
    assert isinstance(plan, Plan), plan
    seen = []

    def look(rows, wide, flags, size):
        seen.append((values(c_float, rows, 6), values(c_double, wide, 6), values(c_int32, flags, 5)))

    kernel.body = look
    replayed(plan, kernel, torch.arange(6.0).view(2, 3) * 10, torch.arange(2.0).view(1, 2) + 5)
    assert seen == [([0.0, 30.0, 10.0, 40.0, 20.0, 50.0], [5.0, 6.0] * 3, [0] * 5)]


def test_descriptors_are_encoded_once_per_address():
    """A descriptor is encoded for the call's own address; those of the last addresses are kept, boundedly."""

    def launch(kernel, outs, x):
        launching.at(kernel, (1,))(descriptor(x.view(-1)), x, descriptor(outs[0], "nan"), size=2)

    fake = FakeMachine()
    plan, notes, kernel, _, _ = recorded(launch, torch.zeros(4, 8), fake=fake)
    assert isinstance(plan, Plan) and not fake.encoded
    tensors = [torch.zeros(4, 8) for _ in range(MAPS + 3)]
    out = torch.empty(4, 4)
    for x in tensors:
        for _ in range(2):
            _, ((_, _, launched),) = replayed(plan, kernel, x, outs=(out,))
            maps = ("map", x.data_ptr(), (32,), (1,), "zero"), ("map", out.data_ptr(), (4, 4), (4, 1), "nan")
            assert launched == (maps[0], x.data_ptr(), maps[1], 2)
    assert fake.encoded.count(out.data_ptr()) == 1 and len(fake.encoded) == len(tensors) + 1
    assert len(plan.launches[0].descriptors[0][3]) <= MAPS


def test_coinciding_tensors_are_a_condition():
    """Two arguments at one address: the plan holds for calls where they are at one address again."""

    def launch(kernel, outs, x, y, z):
        launching.at(kernel, (1,))(x, y, z, size=0)

    x, y = torch.zeros(4), torch.zeros(4)
    plan, _, kernel, _, _ = recorded(launch, x, y, x.view(2, 2))
    assert plan.same == ((0, 2),)
    at = lambda *tensors: [t.data_ptr() for t in tensors]  # noqa: E731
    assert plan.fits(at(y, x, y)) and not plan.fits(at(x, y, y)) and plan.fits(at(x, x, x))
    _, ((_, _, launched),) = replayed(plan, kernel, y, x, y)
    assert launched == (y.data_ptr(), x.data_ptr(), y.data_ptr(), 0)
    empty = torch.empty(0)
    plan, _, _, _, _ = recorded(launch, x, empty, empty)
    assert isinstance(plan, Plan) and not plan.same


def launches(kernel, *tensors):
    launching.at(kernel, (1,))(*tensors, *[None] * (3 - len(tensors)), 0)


KEPT = torch.zeros(8)  # a tensor that a launcher would hold between calls
REFUSED = {
    "unknown origin": lambda kernel, outs, x, y: launches(kernel, x, KEPT),
    "starts in the middle": lambda kernel, outs, x, y: launches(kernel, x[1:]),
    "middle of a workspace": lambda kernel, outs, x, y: launches(kernel, torch.empty(8)[2:]),
    "computes": lambda kernel, outs, x, y: launches(kernel, x + 1),
    "writes": lambda kernel, outs, x, y: launches(kernel, outs[0].zero_()),
    "copies": lambda kernel, outs, x, y: launches(kernel, torch.empty(4, 2).copy_(x)),
    "reads values": lambda kernel, outs, x, y: launching.at(kernel, (1,))(x, x, x, size=y.sum().item()),
    "reads a value": lambda kernel, outs, x, y: launching.at(kernel, (1,))(x, x, x, size=y[0].item()),
    "copy of a result": lambda kernel, outs, x, y: launches(kernel, outs[0].t().contiguous()),
    "copy in another dtype": lambda kernel, outs, x, y: launches(kernel, x.view(torch.int32).t().contiguous()),
    "too many": lambda kernel, outs, x, y: [launches(kernel, x) for _ in range(LAUNCHES + 1)],
    "too much": lambda kernel, outs, x, y: launches(kernel, x, torch.empty(WORKSPACE_BYTES + 1, dtype=torch.uint8)),
    "nothing": lambda kernel, outs, x, y: None,
    "a default": lambda kernel, outs, x, y: launching.at(kernel, (1,))(x, y),
    "an object": lambda kernel, outs, x, y: launching.at(kernel, (1,))(x, y, x, size=(1, 2)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_plan_cannot_express(case):
    """The call is still done, and there is a reason instead of a plan."""

    class Lenient(FakeKernel):
        def __getitem__(self, grid):
            return lambda *args, **options: self.notes.append(args)

    kernel, outs = Lenient(NAMES), (torch.empty(4, 2),)
    args = (torch.zeros(4, 2), torch.zeros(8))
    found = record(FakeMachine().machine, args, outs, lambda: REFUSED[case](kernel, outs, *args))
    assert isinstance(found, str) and found
    assert len(kernel.notes) == {"too many": LAUNCHES + 1, "nothing": 0}.get(case, 1)


def test_results_that_lie_on_arguments():
    x = torch.zeros(4, 4)
    found, notes, *_ = recorded(lambda kernel, outs, x: launches(kernel, x, outs[0]), x, outs=(x,))
    assert found == "result 0 lies where another tensor begins" and len(notes) == 1


def test_unknown_form_and_watched_launches():
    launch = lambda kernel, outs, x: launches(kernel, x)  # noqa: E731
    assert recorded(launch, torch.zeros(3), fake=FakeMachine(refusal="triton 9"))[0] == "triton 9"
    found, notes, *_ = recorded(launch, torch.zeros(3), fake=FakeMachine(watched=True))
    assert "watched" in found and len(notes) == 1
    plan, _, kernel, fake, _ = recorded(launch, torch.zeros(3))
    assert plan.usable()
    fake.watched = True
    assert not plan.usable()
    fake.watched = False
    kernel.hooks.append(print)
    assert not plan.usable()


def test_errors_of_a_launch_are_raised():
    def launch(kernel, outs, x):
        raise RuntimeError("out of resources")

    with pytest.raises(RuntimeError, match="out of resources"):
        recorded(launch, torch.zeros(3))
    assert launching._observer.get() is None


def test_other_device():
    plan, _, kernel, fake, _ = recorded(lambda kernel, outs, x: launches(kernel, x), torch.zeros(3))
    replayed(plan, kernel, torch.zeros(3))
    assert fake.guarded == []
    fake.current = 1
    replayed(plan, kernel, torch.zeros(3))
    assert fake.guarded == [plan.device]


@pytest.fixture
def served(monkeypatch):
    """``attention`` served by a launcher whose kernel is a stand-in that copies nothing; what it was launched with."""
    fake, kernel = FakeMachine(), FakeKernel(NAMES)

    def launch(outs, q, kv, mask, sink, scale, causal, window):
        launching.at(kernel, (1,))(q, kv, outs[0], size=q.shape[1])

    chosen = Launcher("stand-in", lambda *args: None, launch, replayable=True)
    monkeypatch.setattr(dispatch, "select", lambda op, args: chosen)
    monkeypatch.setattr(decisions, "_machine", lambda tensor: fake.machine)
    decisions.forget()
    yield SimpleNamespace(fake=fake, kernel=kernel, launcher=chosen)
    decisions.forget()


def attend(q, kv, **modes):
    return ops.attention(q, kv, None, None, 0.5, **modes)


def kinds(served):
    found = [note[0] for note in served.kernel.notes]
    served.kernel.notes.clear()
    return found


def operands(queries=3):
    return torch.zeros(1, queries, 2, 8), torch.zeros(1, 5, 8)


def test_the_first_call_is_recorded(served):
    """Ordinary (recorded), then replayed; each signature and each mode for itself; the op's result is the one that
    was launched into."""
    for _ in range(4):
        q, kv = operands()
        out = attend(q, kv)
        assert served.kernel.notes[-1][3] == (q.data_ptr(), kv.data_ptr(), out.data_ptr(), 3)
        assert out.shape == q.shape and not out.requires_grad
    assert kinds(served) == ["ordinary", "replayed", "replayed", "replayed"]
    q, kv = operands(4)
    assert [attend(q, kv).shape for _ in range(3)] and kinds(served) == ["ordinary", "replayed", "replayed"]
    assert [attend(q, kv, batch_invariant=True) is None for _ in range(3)] == [False] * 3
    assert kinds(served) == ["ordinary", "replayed", "replayed"]
    out = torch.empty(q.shape)
    for _ in range(3):
        assert ops.attention.out(q, kv, None, None, 0.5, out=out) is out
        assert served.kernel.notes[-1][3][2] == out.data_ptr()
    assert kinds(served) == ["ordinary", "replayed", "replayed"]
    with pytest.raises(ValueError, match="out"):
        ops.attention.out(q, kv, None, None, 0.5, out=torch.empty(3))


def test_when_a_plan_goes(served, monkeypatch):
    """A registered launcher and a full memory forget plans; tensors that no longer coincide have it made anew, not
    endlessly; what nothing may replay is launched the ordinary way for ever."""
    q, kv = operands()
    for _ in range(3):
        attend(q, kv)
    ops_module = dispatch._launchers.get("attention", [])
    dispatch.register_launcher("attention", Launcher("nobody", lambda *args: "a test", lambda *args: None))
    dispatch._launchers["attention"] = ops_module
    attend(q, kv)
    assert kinds(served) == ["ordinary", "replayed", "replayed", "ordinary"]
    both = torch.zeros(1, 2, 2, 8)
    shared = lambda: ops.attention(both, both[:, :, 0].as_strided((1, 2, 8), (16, 8, 1)), None, None, 0.5)  # noqa: E731
    apart = lambda: ops.attention(both, torch.zeros(1, 2, 8), None, None, 0.5)  # noqa: E731
    for _ in range(3):
        shared()
    assert kinds(served) == ["ordinary", "replayed", "replayed"]
    for _ in range(3):
        apart()
    assert kinds(served) == ["ordinary", "replayed", "replayed"]
    shared()  # this one could be replayed by what is known of tensors that lie apart
    assert kinds(served) == ["replayed"]
    monkeypatch.setattr(decisions, "LIMIT", 2)
    for size in range(6, 12):
        for _ in range(3):
            attend(torch.zeros(1, size, 2, 8), kv)
        assert len(decisions._known) <= 2
    assert kinds(served) == ["ordinary", "replayed", "replayed"] * 6


def test_recordings_are_not_tried_for_ever(served):
    served.fake.refusal = "a form that is not known"
    q, kv = operands()
    for _ in range(10):
        attend(q, kv)
    assert kinds(served) == ["ordinary"] * 10
    decision = decisions.recall(decisions.signature("attention", (q, kv, None, None, 0.5, False, 0), OFF)[0])
    assert decision.tries == 0 and decision.outcome == "a form that is not known"


def test_launchers_must_allow_it(served, monkeypatch):
    object.__setattr__(served.launcher, "replayable", False)
    q, kv = operands()
    for _ in range(4):
        attend(q, kv)
    assert kinds(served) == ["ordinary"] * 4
    object.__setattr__(served.launcher, "replayable", True)
    monkeypatch.setattr(decisions, "REPLAYS", False)
    decisions.forget()
    for _ in range(4):
        attend(q, kv)
    assert kinds(served) == ["ordinary"] * 4


def test_profiler_in_the_middle(served):
    q, kv = operands()
    for watched in (False, False, False, True, True, False):
        served.fake.watched = watched
        attend(q, kv)
    assert kinds(served) == ["ordinary", "replayed", "replayed", "ordinary", "ordinary", "replayed"]


def test_gradients_are_refused_at_every_call(served):
    """With gradients asked for, the result refuses backward, replayed or not; without, nothing is kept for it."""
    q, kv = operands()
    q.requires_grad_()
    for _ in range(4):
        out = attend(q, kv)
        with pytest.raises(NotImplementedError, match="attention has no backward"):
            out.sum().backward()
    assert kinds(served) == ["ordinary", "replayed", "replayed", "replayed"]
    with torch.no_grad():
        assert not attend(q, kv).requires_grad
    with torch.inference_mode():
        assert attend(*operands()).is_inference()
    assert kinds(served) == ["replayed"] * 2


def test_the_switch_is_read_at_every_call(monkeypatch):
    args = (torch.zeros(1, 4, 8), 1)
    keys = []
    for value in (None, "deepgemm", "other", None):
        monkeypatch.delenv(decisions.SWITCH, raising=False)
        if value is not None:
            monkeypatch.setenv(decisions.SWITCH, value)
        keys.append(decisions.signature(decisions.SWITCHED, args, OFF)[0])
    assert keys[0] == keys[3] and len(set(keys)) == 3
    monkeypatch.setattr(os, "environ", dict(os.environ) | {decisions.SWITCH: "deepgemm"})
    assert decisions.signature(decisions.SWITCHED, args, OFF)[0] not in (keys[0], keys[2])


def test_nothing_is_kept_alive(served):
    """Neither arguments nor results nor workspaces outlive their call."""
    q, kv = operands()
    for _ in range(3):
        attend(q, kv)
    gc.collect()
    before = sum(type(x) is torch.Tensor for x in gc.get_objects())
    for _ in range(20):
        attend(*operands())
    gc.collect()
    assert sum(type(x) is torch.Tensor for x in gc.get_objects()) == before
