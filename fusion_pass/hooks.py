"""The pass in the hooks of Inductor, for those who compile with ``backend="inductor"``.

    with fusion_pass.enabled():
        compiled = torch.compile(model)
        compiled(inputs)                     # the first call compiles: it has to be inside

It stands in the post-grad hook beside whatever stands there already. The hook runs only when Inductor compiles: on a
hit of its cache the stored code is already the fused one, and the report is fetched from where it was stored (see
``store``). A pass given to one compilation by ``torch.compile(options={"post_grad_custom_pre_pass": ...})`` replaces
the
hook for that compilation: Inductor's rule, not ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import compat, guarded, store
from .config import Config
from .fingerprint import fingerprint
from .report import Report

_SLOT = "post_grad_custom_pre_pass"
_InferenceAware: Any = compat.pass_base()


class JointPass(CustomGraphPass):
    """The pass over the graph that AOTAutograd made, before Inductor's own passes; used by the backend."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, graph: fx.Graph) -> None:
        gm = compat.owning_module(graph)
        if compat.is_joint_or_backward(graph):
            store.add(Report(nodes=len(graph.nodes), notes=[guarded.TRAINING]))
            return
        store.add(guarded.run(gm, self.config, level="joint"))

    def uuid(self) -> Any:
        """Identity of this pass in Inductor's cache key."""
        return fingerprint(self.config, "joint")


class PostGradPass(_InferenceAware):  # type: ignore[misc]
    """The pass in Inductor's post-grad hook; used by :func:`install` and :func:`enabled`."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        if store.collecting():
            return  # backend="fusion_pass" is compiling this graph: its own pass has been here
        if is_inference is None:
            is_inference = compat.post_grad_is_inference()
        if is_inference is False:
            if not compat.is_joint_or_backward(graph):
                store.add_cacheable(Report(nodes=len(graph.nodes), notes=[guarded.TRAINING]))
            return
        store.add_cacheable(guarded.run(compat.owning_module(graph), self.config, level="post_grad"))

    def uuid(self) -> Any:
        """Identity of this pass in Inductor's cache key."""
        store.note_cache_hits()
        return fingerprint(self.config, "post_grad")


class CompositePass(_InferenceAware):  # type: ignore[misc]
    """Several passes in a slot that takes one (torch before 2.13). Each is called as Inductor would call it."""

    def __init__(self, passes: list[Callable[..., Any]]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        for graph_pass in self.passes:
            if is_inference is not None and compat.told_is_inference(graph_pass):
                graph_pass(graph, is_inference)
            else:
                graph_pass(graph)

    def uuid(self) -> Any:
        """All identities; None (no caching, as Inductor does for plain callables) when one pass has none."""
        identities = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in identities else tuple(identities)


def with_pass(slot: Any, added: Callable[..., Any], *, first: bool = False) -> Any:
    """The value of a pass slot that holds what it held and ``added``, in the form this torch understands."""
    passes = slot.passes if isinstance(slot, CompositePass) else compat.as_pass_list(slot)
    passes = [added, *passes] if first else [*passes, added]
    if len(passes) == 1:
        return added
    return passes if compat.supports_pass_lists() else CompositePass(passes)


def without_passes(slot: Any, kind: type) -> Any:
    """The value of a pass slot without our passes of that kind; what others put there stays as it is."""
    passes = slot.passes if isinstance(slot, CompositePass) else compat.as_pass_list(slot)
    kept = [graph_pass for graph_pass in passes if not isinstance(graph_pass, kind)]
    if len(kept) == len(passes):
        return slot
    if len(kept) <= 1:
        return kept[0] if kept else None
    return kept if compat.supports_pass_lists() else CompositePass(kept)


def install(config: Config | None = None) -> None:
    """Add the pass to Inductor's post-grad hook for the whole process; a pass that is there stays, and runs first.

    Calling it again replaces the configuration. Graphs that are compiled already stay as they are.
    """
    inductor = compat.inductor_config()
    slot = without_passes(getattr(inductor, _SLOT), PostGradPass)
    setattr(inductor, _SLOT, with_pass(slot, PostGradPass(config or Config())))


def uninstall() -> None:
    """Take the pass out of Inductor's post-grad hook; passes of others stay. Does nothing when it is not there."""
    inductor = compat.inductor_config()
    setattr(inductor, _SLOT, without_passes(getattr(inductor, _SLOT), PostGradPass))


@contextlib.contextmanager
def enabled(config: Config | None = None) -> Iterator[None]:
    """The pass in Inductor's post-grad hook while graphs are compiled inside of this context."""
    inductor = compat.inductor_config()
    before = getattr(inductor, _SLOT)
    with inductor.patch({_SLOT: with_pass(without_passes(before, PostGradPass), PostGradPass(config or Config()))}):
        yield
