# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-calls
"""Makes a :mod:`launch plan <.launch_plans>` by watching one ordinary call of a launcher.

Nothing is assumed of the launcher but that it launches through :mod:`fusion_pass.kernels.launching` and reads no tensor
contents. What a plan cannot express makes the call not replayable, never wrong: a pointer that is not exactly the
address of one of the call's tensors, a result or a fresh tensor, a view that starts elsewhere, and every operator other
than allocations, views and those of :data:`DERIVING` on arguments.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import launching
from .launch_plans import Derived, Launch, Machine, Plan

LAUNCHES = 8  # of a plan: calls with more take so long that their host time is hidden
# Bytes of all workspaces of a plan: allocated at once, where the launcher may free one before it takes the next.
WORKSPACE_BYTES = 128 << 20
STEP = 512  # bytes between workspaces, as the caching allocator aligns them

aten = torch.ops.aten
ALLOCATING = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
CLEARING = {aten.zeros.default, aten.new_zeros.default}
PLAIN = {int, float, bool, str, type(None)}  # arguments that are launched with as they are
DERIVING = {aten.clone.default, aten.repeat.default, aten._to_copy.default}


class NotReplayable(Exception):
    """Why a call cannot be replayed."""


class Recorder(TorchDispatchMode):
    """Watches the operators and launches of one call. ``tensors``: those among its arguments; ``results``: its outputs,
    allocated."""

    def __init__(self, machine: Machine, tensors: list[Tensor], results: tuple[Tensor, ...]):
        super().__init__()
        self.machine, self.inputs, self.results = machine, tensors, results
        self.problem: str | None = None
        self.launches: list[tuple[Any, tuple[Any, ...], dict[int, tuple[Any, ...]]]] = []
        self.workspaces: list[Tensor] = []  # kept, so that no two have one address
        self.derived: list[tuple[Derived, Tensor]] = []
        self.cleared: list[Tensor] = []
        self.same: list[tuple[int, int]] = []
        self._known: dict[int, tuple[str, int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                kind = ("input", index)
                if (first := self._known.setdefault(tensor.data_ptr(), kind)) is not kind:
                    self.same.append((first[1], index))
        for index, tensor in enumerate(results):
            self._found("result", index, tensor)

    def _found(self, kind: str, index: int, tensor: Tensor) -> None:
        if tensor.numel() and self._known.setdefault(tensor.data_ptr(), (kind, index)) != (kind, index):
            self.problem = f"{kind} {index} lies where another tensor begins"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.problem is None:
            try:
                self._operator(func, args, kwargs, result)
            except NotReplayable as reason:
                self.problem = str(reason)
        return result

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func in ALLOCATING:
            if result.numel():
                self._found("workspace", len(self.workspaces), result)
                self.workspaces.append(result)
        elif func in CLEARING:
            self._found("cleared", len(self.cleared), result)
            self.cleared.append(result)
        elif func in DERIVING:
            step = self._derivation(func, args, kwargs)
            self._found("derived", len(self.derived), result)
            self.derived.append((step, result))
        elif not _keeps_address(func, args, result):
            raise NotReplayable(f"operator {func}")

    def _derivation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Derived:
        tensor, rest = args[0], args[1:]
        kind, index = self._known.get(tensor.data_ptr(), ("", 0))
        if kind not in ("input", "derived") or not tensor.numel() or any(isinstance(x, Tensor) for x in rest):
            raise NotReplayable(f"operator {func} on what is no argument")
        owner = self.inputs[index] if kind == "input" else self.derived[index][1]
        if owner.dtype != tensor.dtype:
            raise NotReplayable(f"operator {func} on an argument seen in another dtype")
        view = (tuple(tensor.shape), tensor.stride())
        whole = view == (tuple(owner.shape), owner.stride())
        source = index if kind == "input" else len(self.inputs) + index
        return Derived(func, source, None if whole else view, rest, kwargs)

    def launched(self, kernel: Any, compiled: Any, grid: Any, args: Any, options: dict[str, Any]) -> None:
        """An observer of :mod:`fusion_pass.kernels.launching`."""
        if self.problem is not None:
            return
        try:
            self._launched(kernel, compiled, grid, args, options)
        except NotReplayable as reason:
            self.problem = str(reason)

    def _launched(self, kernel: Any, compiled: Any, grid: Any, args: Any, options: dict[str, Any]) -> None:
        if len(self.launches) == LAUNCHES:
            raise NotReplayable(f"more than {LAUNCHES} launches")
        entry = self.machine.entry(kernel, compiled, grid)
        if isinstance(entry, str):
            raise NotReplayable(entry)
        names = kernel.arg_names
        missing = [name for name in names[len(args) :] if name not in options]
        if missing or len(args) > len(names):
            raise NotReplayable(f"argument {missing[:1]} of a kernel is left to its default")
        values = (*args, *(options[name] for name in names[len(args) :]))
        places: dict[int, tuple[Any, ...]] = {}
        for position, value in enumerate(values):
            if type(value) in PLAIN:
                continue
            if position in entry.descriptors:
                places[position] = (self._place(value.base), *_descriptor_form(value))
            elif isinstance(value, Tensor):
                places[position] = (self._place(value),)
            else:
                raise NotReplayable(f"an argument of type {type(value).__name__}")
        self.launches.append((entry, values, places))

    def _place(self, tensor: Tensor) -> tuple[str, int] | None:
        """Where a pointer comes from; None: it is null."""
        address = tensor.data_ptr()
        if not address:
            return None
        if address not in self._known:
            raise NotReplayable("a pointer of unknown origin")
        return self._known[address]

    def plan(self, device: int) -> Plan:
        """The plan of what was seen. NotReplayable: there is none."""
        if self.problem is not None:
            raise NotReplayable(self.problem)
        if not self.launches:
            raise NotReplayable("no launch was seen")
        offsets, size = [], 0
        for tensor in self.workspaces:
            offsets.append(size)
            size += -(-tensor.untyped_storage().nbytes() // STEP) * STEP
        if size > WORKSPACE_BYTES:
            raise NotReplayable(f"{size >> 20} MiB of workspaces")
        counts = {
            "input": len(self.inputs),
            "result": len(self.results),
            "workspace": len(self.workspaces),
            "derived": len(self.derived),
            "cleared": len(self.cleared),
        }
        first = dict(zip(counts, itertools.accumulate(counts.values(), initial=0)))

        def number(place: tuple[str, int]) -> int:
            return first[place[0]] + place[1]

        where = self.results[0].device
        return Plan(
            self.machine,
            device,
            tuple(self.same),
            tuple(_allocation(tuple(t.shape), t.stride(), t.dtype, where) for t in self.results),
            _allocation((size,), (1,), torch.uint8, where) if size else None,
            tuple(offsets),
            tuple(step for step, _ in self.derived),
            tuple(functools.partial(torch.zeros, tuple(t.shape), dtype=t.dtype, device=where) for t in self.cleared),
            tuple(_launch(entry, values, places, number) for entry, values, places in self.launches),
        )


# What Inductor's own code allocates with: on the current device, past the dispatcher.
_empty_cuda = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)


def _allocation(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    if device.type == "cuda" and _empty_cuda is not None:
        return functools.partial(_empty_cuda, size, stride, dtype)
    return functools.partial(torch.empty_strided, size, stride, dtype=dtype, device=device)


def _descriptor_form(value: Any) -> tuple[list[int], list[int], str]:
    return list(value.shape), list(value.strides), value.padding


def _keeps_address(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operator only looks at a tensor in another way, from the same address on."""
    if not args or not isinstance(args[0], Tensor) or not isinstance(result, Tensor):
        return False
    aliases = (argument.alias_info for argument in func._schema.arguments)
    if any(alias is not None and alias.is_write for alias in aliases):
        return False
    storage: int = result.untyped_storage()._cdata
    return storage == args[0].untyped_storage()._cdata and result.data_ptr() == args[0].data_ptr()


def _launch(entry: Any, values: tuple[Any, ...], places: dict[int, Any], number: Callable[[Any], int]) -> Launch:
    template: list[Any] = list(entry.head)
    pointers: list[tuple[int, int]] = []
    descriptors: list[tuple[int, int, Callable[[int], Any], dict[int, Any]]] = []
    done = 0
    for position, (place, *form) in places.items():
        template += values[done:position]
        done = position + 1
        if not form:
            if place is not None:
                pointers.append((len(template), number(place)))
            template.append(0)
            continue
        if place is None:
            raise NotReplayable("a descriptor of nothing")

        def encode(address: int, describe: Any = entry.descriptors[position], form: Any = form) -> Any:
            return describe(address, *form)[0]

        descriptors.append((len(template), number(place), encode, {}))
        template += [None, *form[0], *form[1]]
    template += values[done:]
    return Launch(entry.call, template, entry.stream, tuple(pointers), tuple(descriptors), entry.hooks)


def record(machine: Machine, args: tuple[Any, ...], outs: tuple[Tensor, ...], run: Callable[[], None]) -> Plan | str:
    """Do ``run()``, the ordinary launch of a call with ``args`` into ``outs``, and return its plan or why there is
    none. Errors of the launch itself are raised."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    if not machine.undisturbed():
        run()
        return "launches are watched, or kernels debugged"
    recorder = Recorder(machine, tensors, outs)
    with recorder, launching.observing(recorder.launched):
        run()
    try:
        return recorder.plan(outs[0].get_device())
    except NotReplayable as reason:
        return str(reason)
