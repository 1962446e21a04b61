# SPDX-License-Identifier: Apache-2.0
"""Launch plans: what a call of one signature launches, and how to launch it again without the launcher's Python.

Everything that a launcher does on the host follows from the signature of a call (:mod:`.decisions`): the kernels, their
grids, every number they are given, the sizes of workspaces and results. Only addresses differ. A plan therefore holds
the launches with their arguments, and for every pointer the place it comes from: the n-th tensor of the call, a
result, a workspace, or a tensor that an operator makes of an argument first. :mod:`.recording` makes plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAPS = 64  # addresses whose encoded descriptors are kept, per descriptor of a plan


@dataclass(frozen=True)
class Machine:
    """What launching asks of the machine.

    entry(kernel, compiled, grid): how to call what a launch returned (see ``triton/calling.py``), or a reason why not.
    undisturbed(): whether launches may go past Triton now. device(): index of the current device. stream(index): handle
    of that device's current stream. guard(index): makes a device current.
    """

    entry: Callable[[Any, Any, tuple[int, ...]], Any]
    undisturbed: Callable[[], bool]
    device: Callable[[], int]
    stream: Callable[[int], int]
    guard: Callable[[int], AbstractContextManager[Any]]


@functools.cache
def cuda_machine() -> Machine | None:
    """The machine of CUDA tensors; None where kernels cannot be called past Triton."""
    from ..triton import calling

    bindings = (getattr(torch._C, name, None) for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"))
    device, stream = bindings
    if calling.unknown_form() or device is None or stream is None:
        return None
    return Machine(calling.entry, calling.undisturbed, device, stream, torch.cuda.device)


@dataclass(frozen=True)
class Launch:
    """One launch: ``call(*template)`` with the stream at ``stream``, places' addresses at the positions of ``pointers``
    and encoded descriptors at those of ``descriptors``: (position, place, function of an address, what it returned)."""

    call: Callable[..., None]
    template: list[Any]
    stream: int
    pointers: tuple[tuple[int, int], ...]
    descriptors: tuple[tuple[int, int, Callable[[int], Any], dict[int, Any]], ...]
    hooks: list[Any]


@dataclass(frozen=True)
class Derived:
    """An operator applied to an argument before the launches: ``function(tensor, *args, **kwargs)``, the tensor being
    number ``source`` of the call's tensors and the results so far, seen in ``view`` (size, strides) unless None."""

    function: Callable[..., Tensor]
    source: int
    view: tuple[tuple[int, ...], tuple[int, ...]] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a call launches. Places are numbered: the call's tensors, its results, ``offsets`` into one workspace, then
    the tensors of ``derived`` and ``cleared``.

    same: pairs of tensors that had one address when the plan was made, and must have it whenever it is used: which of
    both a pointer meant is not known. outputs, workspace, cleared: allocate results, the workspace and zeroed tensors,
    while ``device`` is current.
    """

    machine: Machine
    device: int
    same: tuple[tuple[int, int], ...]
    outputs: tuple[Callable[[], Tensor], ...]
    workspace: Callable[[], Tensor] | None
    offsets: tuple[int, ...]
    derived: tuple[Derived, ...]
    cleared: tuple[Callable[[], Tensor], ...]
    launches: tuple[Launch, ...]

    def fits(self, addresses: list[int]) -> bool:
        """Whether tensors at ``addresses`` coincide as they did."""
        return all(addresses[first] == addresses[second] for first, second in self.same)

    def usable(self) -> bool:
        """Whether nobody has begun to watch launches."""
        for launch in self.launches:
            if launch.hooks:
                return False
        return self.machine.undisturbed()

    def replay(self, args: tuple[Any, ...], addresses: list[int], outs: tuple[Tensor, ...] | None = None) -> Any:
        """Run the call whose arguments are ``args``, their tensors at ``addresses`` (which must fit); returns its
        results (one tensor, or a tuple). ``outs``: write to these instead of new ones."""
        if self.device == self.machine.device():
            return self._replay(args, addresses, outs)
        with self.machine.guard(self.device):
            return self._replay(args, addresses, outs)

    def _replay(self, args: tuple[Any, ...], addresses: list[int], outs: tuple[Tensor, ...] | None) -> Any:
        results = outs or [make() for make in self.outputs]
        places = [*addresses, *[result.data_ptr() for result in results]]
        if self.workspace is not None:
            memory = self.workspace()  # referenced until everything is launched
            base = memory.data_ptr()
            places += [base + offset for offset in self.offsets]
        if self.derived or self.cleared:
            kept = [*self._derive(args), *[make() for make in self.cleared]]
            places += [tensor.data_ptr() for tensor in kept]
        stream = self.machine.stream(self.device)
        for launch in self.launches:
            arguments = launch.template.copy()
            arguments[launch.stream] = stream
            for position, place in launch.pointers:
                arguments[position] = places[place]
            for position, place, encode, known in launch.descriptors:
                address = places[place]
                described = known.get(address)
                if described is None:
                    if len(known) >= MAPS:
                        known.clear()
                    described = known[address] = encode(address)
                arguments[position] = described
            launch.call(*arguments)
        return results[0] if len(results) == 1 else tuple(results)

    def _derive(self, args: tuple[Any, ...]) -> list[Tensor]:
        tensors = [value for value in args if isinstance(value, Tensor)]
        count = len(tensors)
        for step in self.derived:
            source = tensors[step.source]
            if step.view is not None:
                source = source.as_strided(*step.view)
            tensors.append(step.function(source, *step.args, **step.kwargs))
        return tensors[count:]
