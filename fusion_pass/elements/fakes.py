"""Metadata tensors of a graph under one fake-tensor mode.

``make_fx`` on real tensors gives every node's ``meta["val"]`` a mode of its own, and tensors of different modes cannot
meet in one operator: metadata of new nodes could not be computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree


@contextlib.contextmanager
def metadata_mode(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Operators run in the body compute metadata only, under the fake mode of ``tensors`` (none: as they are)."""
    mode = torch._guards.detect_fake_mode(list(tensors))
    if mode is None:
        with torch.no_grad():
            yield
        return
    # Some operators (padding, for one) take symbolic sizes in their Python form only, which AOT traces with as well.
    symbolic = enable_python_dispatcher() if mode.shape_env is not None else contextlib.nullcontext()
    with mode, symbolic:
        yield


def unify_fake_modes(graph: fx.Graph) -> None:
    """Give all metadata tensors of ``graph`` one mode, if they have several and no symbolic size (those share one)."""
    modes: set[int] = set()
    for node in graph.nodes:        # a loop over everything: kept plain
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            modes.add(id(value.fake_mode))
        elif isinstance(value, (list, tuple)):
            modes.update(id(v.fake_mode) for v in value if isinstance(v, FakeTensor))
    if len(modes) < 2:
        return
    mode = FakeTensorMode()

    def moved(value: object) -> object:
        if not isinstance(value, FakeTensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device,
                                   requires_grad=value.requires_grad)

    with mode:
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
