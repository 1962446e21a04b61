# SPDX-License-Identifier: Apache-2.0
"""Modes of an op call: keyword arguments that many ops share and that say *how* to compute, not what.

``batch_invariant``: the result of a token depends on no other token of the call, bit for bit. Every choice that is
usually made from the number of tokens (splits of the keys, tiles, KvSplit, which kernel) is then made without it.
``check_inputs``: the op reads its index lists and lengths before it runs and raises ValueError for one that points
outside (see :mod:`.ops.values`); without it such an index counts as "no key".
``weight_ready``: nothing that may still run when the kernel in front of this one starts writes the weight. A product
may then read it before that kernel is done. The pass says so of weights that are inputs of the graph and that the
graph does not write.

A mode is an argument of the op, so that it is part of a compiled graph and of every cache key. Below the op, the
functions that choose a kernel read it from :func:`current`: their signatures then stay those of the op.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Modes:
    """The modes of one call; all off by default."""

    batch_invariant: bool = False
    check_inputs: bool = False
    weight_ready: bool = False


OFF = Modes()
_all = {flags: Modes(*flags) for flags in itertools.product((False, True), repeat=3)}
_all[False, False, False] = OFF


def modes_of(batch_invariant: bool = False, check_inputs: bool = False, weight_ready: bool = False) -> Modes:
    """The one instance with these modes (making one per call takes as long as choosing a kernel)."""
    return _all[batch_invariant, check_inputs, weight_ready]


_current: ContextVar[Modes] = ContextVar("fusion_pass_modes", default=OFF)


def current() -> Modes:
    """The modes of the op call that is running in this thread."""
    return _current.get()


@contextlib.contextmanager
def using(modes: Modes) -> Iterator[None]:
    """Run the body under ``modes``."""
    token = _current.set(modes)
    try:
        yield
    finally:
        _current.reset(token)
