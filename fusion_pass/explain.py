"""``fusion_pass.explain(model)(*args, **kwargs)``: what would be fused, without compiling or running anything.

The model and its arguments are copied as fake tensors (shapes and dtypes without data), so nothing is computed, no
memory is taken and no cache object of the caller changes. Dynamo captures the copy; at a graph break, Python goes on
with fake results and the next graph is captured as well. All graphs make one report.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import compat, guarded, triton_ops
from .backend import run_boxed
from .config import Config
from .details import describe
from .report import GatedChain, Report

log = logging.getLogger(__name__)


def explain(
    model: Callable[..., Any], *, config: Config | None = None, dynamic: bool | None = None
) -> Callable[..., Report]:
    """Return a function that takes the model's arguments and returns the :class:`Report` of what would be fused.

    model: an ``nn.Module`` or a function. dynamic: as for ``torch.compile``.

    With autograd recording (outside of ``torch.no_grad()``, and parameters or inputs that require gradients) the chains
    that are found are reported as gated, because compiling now would leave them alone.
    """
    config = config or Config()

    def capture(*args: Any, **kwargs: Any) -> Report:
        from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        recording = torch.is_grad_enabled() and _requires_grad((model, args, kwargs))
        # With a shape environment, sizes that depend on data (nonzero) are symbols instead of an error.
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        with FakeCopyMode(fake_mode):
            fake_model, fake_args, fake_kwargs = copy.deepcopy((model, args, kwargs))
        gathered: list[Report] = []
        notes: list[str] = []
        with torch.no_grad(), fake_mode, _unlimited_recompiles(), compat.entries_forgotten(fake_model):
            run = compat.compile_apart(fake_model, backend=_capturing_backend(config, gathered), dynamic=dynamic)
            try:
                run(*fake_args, **fake_kwargs)
            except Exception as error:
                if not gathered or config.strict:
                    raise
                log.debug("capture ended early", exc_info=True)
                notes.append(f"capture ended after graph {len(gathered)}: {guarded.first_line(error)}")
        report = Report.merge(gathered) if gathered else Report(graphs=0, notes=["Dynamo captured no graph"])
        report.notes += notes
        if report.graphs > 1:
            report.notes.append(
                f"{report.graphs} graphs: graph breaks split the model (TORCH_LOGS=graph_breaks says where)"
            )
        return _gate_training(report) if recording else report

    return capture


def _capturing_backend(config: Config, gathered: list[Report]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    def rewrite_copy(aot_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        rewritten = fx.GraphModule(aot_gm, copy.deepcopy(aot_gm.graph))
        report = guarded.run(rewritten, config, level="explain")
        if report.fused:
            report.details.append(describe(aot_gm.graph, rewritten.graph))
        gathered.append(report)
        return run_boxed(aot_gm)  # on fake tensors: shapes only

    backend: Callable[..., Any] = aot_autograd(fw_compiler=rewrite_copy, inference_compiler=rewrite_copy)

    def capture(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with triton_ops.kept_whole(gm, inputs):
            return backend(gm, inputs)  # type: ignore[no-any-return]

    return capture


def _gate_training(report: Report) -> Report:
    gated = [GatedChain(roles=chain.roles, gate=guarded.TRAINING, where=chain.where) for chain in report.fused]
    report.fused, report.gated = [], [*gated, *report.gated]
    report.notes.append(guarded.TRAINING)
    return report


def _requires_grad(values: Any) -> bool:
    model, args, kwargs = values
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        tensors += model.parameters()
    return any(tensor.requires_grad for tensor in tensors)


@contextlib.contextmanager
def _unlimited_recompiles() -> Iterator[None]:
    # The captures of earlier calls must not make Dynamo give up on this one.
    import torch._dynamo.config as config

    with config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20):
        yield
