"""Compile a model's kernels ahead of its first request: :func:`warmup`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .kernels import warm_up
from .kernels.warm_up import Chain

log = logging.getLogger(__name__)

# Field of Chain: names that models' configurations give it.
NAMES = {
    "heads": ("num_attention_heads", "n_heads"),
    "groups": ("o_groups", "n_groups"),
    "head_dim": ("head_dim",),
    "rope_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "rank": ("o_lora_rank",),
    "window": ("sliding_window", "window_size"),
}
COMPRESSED = 128  # tokens per row of heavily compressed attention


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """What :func:`warmup` did. chain: the sizes it took. calls: op calls. compiled: kernels that Triton compiled (or
    loaded from its disk cache), by name; empty where nothing was new, or where no kernel runs. seconds: wall time.
    refused: ops that ran as the torch reference, with the reason."""

    chain: Chain
    calls: int
    compiled: Mapping[str, int]
    seconds: float
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        kernels = ", ".join(f"{name} {count}" for name, count in sorted(self.compiled.items())) or "nothing new"
        lines = [f"warm-up: {self.calls} calls in {self.seconds:.1f} s; compiled: {kernels}"]
        return "\n".join(lines + [f"  {op}: torch reference ({reason})" for op, reason in self.refused.items()])


def warmup(
    model: Any = None,
    *,
    device: torch.device | str = "cuda",
    tensor_parallel: int = 1,
    batch_invariant: bool = False,
    **sizes: Any,
) -> WarmUp:
    """Compile every kernel that a model's fused layers can need, so that no request waits for a compilation.

    model: a module with a ``config``, a configuration (object or mapping; names as in transformers' DeepseekV4Config or
    DeepSeek's own ModelArgs), or None. sizes: fields of :class:`fusion_pass.kernels.warm_up.Chain`, which complete what
    ``model`` says or replace it; without a model at least ``heads`` and ``groups``. tensor_parallel: heads and groups
    of the configuration are divided by it. batch_invariant: warm up the kernels of ``Config(batch_invariant=True)``.

    The ops run on uninitialised tensors at every number of tokens at which the choice of a kernel can change, up to
    ``max_tokens``. Memory: a few tensors of that many tokens. On a device without kernels the calls are not made.
    Does not cover: inputs whose data is not aligned to 16 bytes, and strides beyond 32 bits, which Triton compiles
    apart.

    Raises ValueError for sizes that are missing or do not fit, TypeError for an unknown field.
    """
    chain = _chain(model, tensor_parallel, sizes)
    where = torch.device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        return WarmUp(chain, 0, {}, 0.0, {"all ops": f"device {where.type}: no kernels to compile"})
    start = time.perf_counter()
    sm_count = torch.cuda.get_device_properties(where).multi_processor_count
    count = 0
    refused: dict[str, str] = {}
    with _compilations() as compiled, torch.no_grad():
        for op, args, more in warm_up.calls(chain, where, sm_count):
            count += 1
            if op not in refused and (reason := _refusal(op, args, more)):
                refused[op] = reason
            if op in refused:
                continue
            target = getattr(torch.ops.fusion_pass, op)
            known = {argument.name for argument in target.default._schema.arguments}
            mode = {"batch_invariant": True} if batch_invariant and "batch_invariant" in known else {}
            target(*args, **more, **mode)
        torch.cuda.synchronize(where)
    result = WarmUp(chain, count, dict(compiled), time.perf_counter() - start, refused)
    log.info("%s", result)
    return result


def _refusal(op: str, args: tuple[Any, ...], more: dict[str, Any]) -> str | None:
    from .kernels import ops

    launcher, reasons = ops.explain(op, ops.SPECS[op].complete(args, more))
    return None if launcher is not None else "; ".join(reasons)


@contextlib.contextmanager
def _compilations() -> Iterator[Counter[str]]:
    """Counts Triton's compilations by kernel name while the body runs; a hook that is set already still runs."""
    import triton  # type: ignore[import-untyped]

    found: Counter[str] = Counter()
    before = triton.knobs.runtime.jit_post_compile_hook

    def count(*args: Any, **kwargs: Any) -> Any:
        found[kwargs["fn"].name.rpartition(".")[2]] += 1
        return before(*args, **kwargs) if before is not None else None

    triton.knobs.runtime.jit_post_compile_hook = count
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def _chain(model: Any, tensor_parallel: int, sizes: dict[str, Any]) -> Chain:
    """The chain's sizes from a model or its configuration, completed and overridden by ``sizes``."""
    fields = {field.name for field in dataclasses.fields(Chain)}
    unknown = sorted(set(sizes) - fields)
    if unknown:
        raise TypeError(f"warmup: unknown field {unknown[0]!r}; the fields are {', '.join(sorted(fields))}")
    found = _from_configuration(getattr(model, "config", model)) if model is not None else {}
    for name in ("heads", "groups"):
        if name in found:
            if found[name] % tensor_parallel:
                expected = f"tensor_parallel to divide the model's {found[name]} {name}"
                raise ValueError(f"warmup: expected {expected}, got {tensor_parallel}")
            found[name] //= tensor_parallel
    found |= sizes
    missing = [name for name in ("heads", "groups") if name not in found]
    if missing:
        raise ValueError(f"warmup: expected {' and '.join(missing)}, from the model's configuration or as arguments")
    chain = Chain(**found)
    _check(chain)
    return chain


def _from_configuration(config: Any) -> dict[str, Any]:
    def read(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    found: dict[str, Any] = {}
    for field, names in NAMES.items():
        value = next((v for v in map(read, names) if v is not None), None)
        if value is not None:
            found[field] = int(value)
    dtype = read("dtype") or read("torch_dtype")
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        found["dtype"] = dtype
    window = found.get("window", Chain.window)
    capacities = [(window, 0)]
    if (topk := read("index_topk")) is not None:
        capacities += [(window, int(topk)), (window, -(-Chain.max_keys // COMPRESSED))]
    found["capacities"] = tuple(capacities)
    if isinstance(fp8 := read("quantization_config"), Mapping) and fp8.get("quant_method") == "fp8":
        found["quant"] = "ue8m0" if fp8.get("scale_fmt") == "ue8m0" else "fp32"
        if fp8.get("weight_block_size"):
            found["weight_block"] = int(fp8["weight_block_size"][0])
    return found


def _check(chain: Chain) -> None:
    if chain.heads < 1 or chain.groups < 1 or chain.heads % chain.groups:
        raise ValueError(f"warmup: expected groups to divide the heads, got {chain.heads} heads, {chain.groups} groups")
    for name, values, known in (("kv", chain.kv, warm_up.KV_FORMS), ("masks", chain.masks, warm_up.MASKS)):
        wrong = [value for value in values if value not in known] if not isinstance(values, str) else [values]
        if wrong:
            raise ValueError(f"warmup: expected {name} to be a tuple out of {known}, got {wrong[0]!r}")
    for name in ("max_tokens", "max_keys", "rank"):
        if getattr(chain, name) < 1:
            raise ValueError(f"warmup: expected {name} >= 1, got {getattr(chain, name)}")
