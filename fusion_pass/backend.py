"""``torch.compile(model, backend="fusion_pass")``.

Where the pass stands: with ``inner="inductor"`` it is the first pass over the graph that AOTAutograd hands to Inductor
(functional ATen, Inductor's decompositions applied, none of its pattern rewrites or paddings yet). That is before
Inductor's graph cache is asked, so the pass sees every graph, reports are complete on cache hits too, and the cache key
is that of the *rewritten* graph: code can never be taken from the cache for a graph that was rewritten differently. The
price is that AOTAutograd's own cache is off for these compilations, as it would skip the pass: a warm start traces
again and takes Inductor's code from the cache. With the kill switch nothing is patched at all, and Inductor gets
exactly the graph that it would have got without this package.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import compat, guarded, store, triton_ops
from .config import Config, split_options
from .hooks import JointPass, with_pass
from .report import Report

log = logging.getLogger(__name__)


def fusion_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Backend of ``torch.compile``: rewrite the inference graph, let ``options["inner"]`` compile it.

    mode: as for Inductor (``"reduce-overhead"``, ``"max-autotune"``, ...). options: fields of :class:`Config`,
    ``mode``, and keys of Inductor's configuration. Raises ValueError for an unknown key, naming the nearest one.

    A graph with autograd recording is compiled as it is; its report says so.
    """
    config, mode, inductor_options = parse_options(mode, options)
    config = config.resolve()
    if config.inner == "inductor":
        return _compile_inductor(gm, example_inputs, config, mode, inductor_options)
    return _compile_traced(gm, example_inputs, config)


def _reset() -> None:
    import torch._inductor.config as inductor_config

    if inductor_config.triton.cudagraphs or torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


# torch.compiler.reset() calls this: recorded CUDA graphs of mode="reduce-overhead" go with the code that owns them.
fusion_pass.reset = _reset  # type: ignore[attr-defined]


def parse_options(mode: str | None, options: Mapping[str, Any] | None) -> tuple[Config, str | None, dict[str, Any]]:
    """Configuration, mode and Inductor's options out of what ``torch.compile`` was given. Raises ValueError."""
    options = dict(options or {})
    mode = options.pop("mode", mode)
    try:
        config, inductor_options = split_options(options, compat.inductor_option_names())
    except (TypeError, ValueError) as error:
        raise compat.option_error(str(error)) from None
    if mode not in (None, "default"):
        from torch._inductor import list_mode_options

        known = ("default", *list_mode_options())
        if mode not in known:
            raise compat.option_error(
                f"backend 'fusion_pass': unknown mode {mode!r}, expected one of {', '.join(known)}"
            )
    return config, mode, inductor_options


def _compile_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: Config, mode: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    from torch._inductor import compile_fx as inductor

    compile_fx: Any = inductor.compile_fx

    try:
        patches = compat.inductor_patches(mode, options)
    except RuntimeError as error:
        raise compat.option_error(f"backend 'fusion_pass': {error}") from None
    left_alone = guarded.DISABLED if config.disable else _foreign(example_inputs)
    if left_alone is not None:
        _finish([Report(nodes=len(gm.graph.nodes), notes=[left_alone])])
        untouched: Callable[..., Any] = compile_fx(gm, example_inputs, config_patches=patches)
        return untouched
    slot = patches.get("joint_custom_pre_pass", compat.inductor_config().joint_custom_pre_pass)
    patches["joint_custom_pre_pass"] = with_pass(slot, JointPass(config), first=True)
    with store.collect() as gathered, compat.aot_cache_disabled(), triton_ops.kept_whole(gm, example_inputs):
        compiled: Callable[..., Any] = compile_fx(gm, example_inputs, config_patches=patches)
    _finish(gathered)
    return compiled


def _compile_traced(gm: fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    run = run_boxed if config.inner == "aot_eager" else run_boxed_interpreted

    foreign = _foreign(example_inputs)

    def inference(aot_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        if foreign is None:
            store.add(guarded.run(aot_gm, config, level="aot"))
        else:
            store.add(Report(nodes=len(aot_gm.graph.nodes), notes=[foreign]))
        return run(aot_gm)

    def forward(aot_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        store.add(Report(nodes=len(aot_gm.graph.nodes), notes=[guarded.TRAINING]))
        return run(aot_gm)

    def backward(aot_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return run(aot_gm)

    lower: Any = aot_autograd(fw_compiler=forward, bw_compiler=backward, inference_compiler=inference)
    with store.collect() as gathered, triton_ops.kept_whole(gm, example_inputs):
        compiled: Callable[..., Any] = lower(gm, example_inputs)
    _finish(gathered)
    return compiled


def run_boxed(gm: fx.GraphModule) -> Callable[..., Any]:
    """Run a traced graph as it is, in AOTAutograd's calling convention (a list of inputs, emptied by the callee)."""

    def call(args: list[Any]) -> Any:
        inputs = tuple(args)
        args.clear()
        return gm(*inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def run_boxed_interpreted(gm: fx.GraphModule) -> Callable[..., Any]:
    """Run a traced graph node by node: slower, and an exception names the node and the user's line."""
    interpreter = fx.Interpreter(gm)

    def call(args: list[Any]) -> Any:
        inputs = tuple(args)
        args.clear()
        return interpreter.run(*inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _foreign(example_inputs: Sequence[Any]) -> str | None:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return guarded.foreign_reason(value for value in example_inputs if not is_traceable_wrapper_subclass(value))


def _finish(gathered: list[Report]) -> None:
    store.add(Report.merge(gathered) if gathered else Report(graphs=1, notes=["no graph reached the pass"]))


def register() -> None:
    """Make ``backend="fusion_pass"`` known to torch where no installed entry point does (a source checkout)."""
    if "fusion_pass" not in compat.registered_backends():
        from torch._dynamo import register_backend

        register_backend(compiler_fn=fusion_pass, name="fusion_pass")


@functools.cache
def backend_with(config: Config) -> Callable[..., Any]:
    """A backend callable with a fixed configuration, for ``torch.compile(backend=...)``; equal configs, equal
    callable.
    """

    def configured(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return fusion_pass(gm, example_inputs, options=config.to_dict())

    configured.__name__ = "fusion_pass"
    return configured
