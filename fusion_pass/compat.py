"""Every difference between torch versions (2.11 to 2.15) that the rest of the package would otherwise have to know.

Features are detected, not deduced from version numbers: nightlies and vendors' builds mix them. Slow modules
(``torch._inductor``, ``torch._dynamo``) are imported inside the functions: ``import fusion_pass`` needs neither.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx


def inductor_config() -> Any:
    """The module ``torch._inductor.config``."""
    import torch._inductor.config as config

    return config


@functools.cache
def inductor_option_names() -> frozenset[str]:
    """Every key that Inductor's configuration knows, in its dotted form (``"triton.cudagraphs"``)."""
    return frozenset(inductor_config().get_config_copy())


def inductor_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The configuration patches that ``torch.compile(backend="inductor", mode=..., options=...)`` would apply.

    Torch's own wrapper checks the types of the values and prepares CUPTI for CUDA graphs. Raises RuntimeError, as torch
    does, for an unknown mode or a value of a wrong type.
    """
    import torch

    wrapper: Any = torch._TorchCompileInductorWrapper
    patches: dict[str, Any] = wrapper(mode, options, None).config
    return patches


@contextlib.contextmanager
def aot_cache_disabled() -> Any:
    """Every compilation in this context traces through AOTAutograd, so that passes run; Inductor's graph cache stays
    on.
    """
    import torch._functorch.config as config

    with config.patch(enable_autograd_cache=False):
        yield


def supports_pass_lists() -> bool:
    """True when a pass slot of Inductor's configuration takes a list (torch 2.13); before, one callable."""
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def pass_base() -> type:
    """Base class for a graph pass with a ``uuid``: the one that is told ``is_inference`` where torch has it (2.12)."""
    from torch._inductor import custom_graph_pass

    base: type = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)
    return base


def told_is_inference(graph_pass: object) -> bool:
    """True when Inductor's post-grad stage calls this pass with ``is_inference``."""
    from torch._inductor import custom_graph_pass

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    return aware is not None and isinstance(graph_pass, aware)


def post_grad_is_inference() -> bool | None:
    """Whether the post-grad stage that is running now compiles an inference graph; None outside of it.

    Needed before torch 2.12 only, where passes are not told: the caller's own argument is the one place that knows.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "post_grad_passes" and "is_inference" in frame.f_locals:
            return bool(frame.f_locals["is_inference"])
        frame = frame.f_back  # type: ignore[assignment]
    return None


def as_pass_list(slot: Any) -> list[Callable[..., Any]]:
    """The passes in a slot of Inductor's configuration, whatever form this torch keeps them in."""
    if slot is None:
        return []
    return list(slot) if isinstance(slot, (list, tuple)) else [slot]


def is_joint_or_backward(graph: fx.Graph) -> bool:
    """True for AOTAutograd's joint graph and for a backward graph: gradients ("tangents") are among the inputs."""
    for node in graph.nodes:
        if node.op != "placeholder":
            return False
        if str(node.target).startswith("tangents_"):
            return True
    return False


def owning_module(graph: fx.Graph) -> fx.GraphModule:
    """The module that a pass's graph belongs to; constants of the graph live there."""
    owner = graph.owning_module
    return owner if isinstance(owner, fx.GraphModule) else fx.GraphModule({}, graph)


def option_error(message: str) -> ValueError:
    """A ValueError that Dynamo hands to the user as it is, instead of wrapping it as a failure of the backend."""
    from torch._dynamo.exc import ShortenTraceback

    class OptionError(ShortenTraceback, ValueError):
        """An option of ``torch.compile(backend="fusion_pass")`` that cannot be meant."""

    return OptionError(message, first_useful_frame=None)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Put a payload into the structured trace (``TORCH_TRACE``, shown by tlparse). Does nothing when none is
    written.
    """
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def tracing_artifacts() -> bool:
    """Is a structured trace being written?"""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers)


def counters() -> Any:
    """``torch._dynamo.utils.counters``: category -> Counter."""
    from torch._dynamo.utils import counters as all_counters

    return all_counters


def registered_backends() -> Iterable[str]:
    """Names that ``torch.compile(backend=...)`` resolves by now or through entry points."""
    from importlib.metadata import entry_points

    names = {entry.name for entry in entry_points(group="torch_dynamo_backends")}
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        names |= set(registry._COMPILER_FNS)
    return names


def packaged_dtypes() -> Iterable[Any]:
    """Data types of the tensors that AOTInductor's C++ code can name."""
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_ATEN

    return DTYPE_TO_ATEN


def compile_apart(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.compile`` whose graphs do not count against the recompile limit of other users of the code (torch
    2.13).
    """
    import inspect

    import torch

    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(function, **options)
    return compiled


@contextlib.contextmanager
def entries_forgotten(function: Any) -> Iterator[None]:
    """What Dynamo compiles of ``function`` (or of a module's ``forward``) in this context does not count against its
    recompile limit later, where nothing of it was compiled before. Torch 2.13 counts apart by itself
    (:func:`compile_apart`).
    """
    import inspect

    import torch

    code = getattr(getattr(function, "forward", function), "__code__", None)
    entries = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    reset = getattr(torch._dynamo, "reset_code", None) or getattr(torch._C._dynamo.eval_frame, "reset_code", None)
    apart = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    clean = not apart and code is not None and entries is not None and reset is not None and not entries(code)
    try:
        yield
    finally:
        if clean and reset is not None:
            reset(code)


def triton_op_names() -> Any:
    """Names of the ops that ``torch.library.triton_op`` defined (newer torch keeps a table of them)."""
    from torch._library import triton

    return getattr(triton, "triton_ops_to_kernels", ())


def triton_op_decomposition(enabled: bool) -> Any:
    """A context in which AOTAutograd takes triton ops apart or not; does nothing where torch has no such switch."""
    import torch._functorch.config as config

    if not hasattr(config, "decompose_custom_triton_ops"):
        return contextlib.nullcontext()
    return config.patch(decompose_custom_triton_ops=enabled)
