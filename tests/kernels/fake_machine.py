# SPDX-License-Identifier: Apache-2.0
"""A machine without a GPU for tests of recorded launches: kernels that note what they are launched with."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fusion_pass.kernels.ops.launch_plans import Machine

STREAM = 77


@dataclass
class FakeKernel:
    """Stands for a jitted function: a launch notes ("ordinary" or "replayed", grid, stream, addresses or values).
    ``body`` is called by a replay with what reached the kernel."""

    arg_names: list[str]
    notes: list[Any] = field(default_factory=list)
    body: Any = None
    hooks: list[Any] = field(default_factory=list)
    described: set[int] = field(default_factory=set)  # positions that were descriptors when last launched

    def __getitem__(self, grid):
        def launch(*args, **options):
            values = (*args, *(options[name] for name in self.arg_names[len(args) :]))
            self.described = {i for i, value in enumerate(values) if hasattr(value, "base")}
            self.notes.append(("ordinary", grid, STREAM, tuple(map(plain, values))))
            return self

        return launch


def plain(value: Any) -> Any:
    """What reaches the GPU of an argument: a tensor's address, an encoded descriptor, or the value."""
    if hasattr(value, "base"):
        return encode(value.base.data_ptr(), list(value.shape), list(value.strides), value.padding)
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def encode(address: int, shape: list[int], strides: list[int], padding: str) -> tuple[Any, ...]:
    return ("map", address, tuple(shape), tuple(strides), padding)


def descriptor(tensor, padding: str = "zero") -> Any:
    return SimpleNamespace(base=tensor, shape=tensor.shape, strides=tensor.stride(), padding=padding)


@dataclass
class FakeMachine:
    """``watched``: hooks are set. ``current``: the current device. ``encoded``: addresses of encoded descriptors."""

    refusal: str | None = None
    watched: bool = False
    current: int = -1
    guarded: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)

    def entry(self, kernel, compiled, grid):
        if self.refusal:
            return self.refusal

        def call(grid, stream, *arguments):
            values = self._unpacked(kernel, arguments)
            kernel.notes.append(("replayed", grid, stream, values))
            if kernel.body is not None:
                kernel.body(*values)

        def describe(address, shape, strides, padding):
            self.encoded.append(address)
            return [encode(address, shape, strides, padding), *shape, *strides]

        descriptors = dict.fromkeys(kernel.described, describe)
        return SimpleNamespace(call=call, head=(grid, None), stream=1, descriptors=descriptors, hooks=kernel.hooks)

    def _unpacked(self, kernel, arguments) -> tuple[Any, ...]:
        """The arguments, one per name: a descriptor's sizes and strides follow it."""
        found, rest = [], list(arguments)
        for position in range(len(kernel.arg_names)):
            value = rest.pop(0)
            found.append(value)
            if position in kernel.described:
                del rest[: 2 * len(value[2])]
        assert not rest
        return tuple(found)

    @property
    def machine(self) -> Machine:
        @contextlib.contextmanager
        def guard(index):
            self.guarded.append(index)
            yield

        return Machine(self.entry, lambda: not self.watched, lambda: self.current, lambda index: STREAM, guard)
