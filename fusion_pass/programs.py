"""``fusion_pass.rewrite``: the pass on a graph that somebody else traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import compat, guarded
from .config import Config
from .report import Report

MAX_CONSTANT = 4096     # elements; larger ones are tables, not constants of a formula


def rewrite(program: Any, config: Config | None = None) -> Report:
    """Rewrite a traced graph in place and return the :class:`Report`.

    program: an ``fx.GraphModule`` of ATen ops (``make_fx``, AOTAutograd, ``torch.export``'s ``.module()``) or a
    ``torch.export.ExportedProgram``, whose signature is kept consistent; a program that torch.export has just made is
    brought into functional ATen form (``run_decompositions()``) when something is fused in it. The graph must carry
    ``meta["val"]``, as all of these do. On failure the graph is as it came; ``config.strict`` raises instead.
    Raises TypeError for anything else.
    """
    config = config or Config()
    if isinstance(program, fx.GraphModule):
        return guarded.run(program, config, level="rewrite")
    graph_module = getattr(program, "graph_module", None)
    if not isinstance(graph_module, fx.GraphModule) or not hasattr(program, "graph_signature"):
        raise TypeError(
            f"rewrite: expected an fx.GraphModule or an ExportedProgram, got {type(program).__name__}; "
            "for a module or function use torch.compile(..., backend='fusion_pass') or fusion_pass.explain"
        )
    if getattr(program, "dialect", "") != "TRAINING":
        return _rewrite_program(program, config)
    # What torch.export hands out first writes in place and keeps composite operators. The pass reads functional ATen;
    # the program becomes its decomposed form only when something was fused.
    functional = program.run_decompositions(_decompositions())
    report = _rewrite_program(functional, config)
    if report.fused:
        vars(program).update(vars(functional))
    return report


def _decompositions() -> Any:
    """torch.export's own table, without the one that turns a write into a slot into arithmetic on positions."""
    table = torch.export.default_decompositions()
    table.pop(torch.ops.aten.select_scatter.default, None)  # type: ignore[no-untyped-call]
    return table


def _rewrite_program(program: Any, config: Config) -> Report:
    before = _output_names(program.graph_module)
    _note_constants(program)
    report = guarded.run(program.graph_module, config, level="rewrite")
    if report.fused and config.resolve().verify != "off":
        report.notes.append("validation works in this process only: a program that is saved or packaged and loaded "
                            "elsewhere computes both forms and compares nothing; rewrite it with verify='off'")
    if report.fused:
        report.notes += _not_packaged(program.graph_module)
    for old, new in zip(before, _output_names(program.graph_module), strict=True):
        if old is not None and new is not None and old != new:
            program.graph_signature.replace_all_uses(old, new)
    return report


def _not_packaged(gm: fx.GraphModule) -> list[str]:
    """Why AOTInductor will refuse the program, as far as its data types say: its own message names the type only."""
    kinds = {n.meta["val"].dtype for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    if torch.float8_e8m0fnu not in kinds or torch.float8_e8m0fnu in compat.packaged_dtypes():
        return []
    return ["AOTInductor of this torch has no tensors of dtype float8_e8m0fnu (aoti_compile_and_package fails with "
            "KeyError): keep the weight scales as float32, or as their bytes (scales.view(torch.uint8))"]


def _note_constants(program: Any) -> None:
    """Export turns constants of the source (the -inf of ``scores[bad] = -inf``) into graph inputs; the recognisers must
    know their values."""
    lifted = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in program.graph_module.graph.nodes:
        value = program.constants.get(lifted.get(node.name)) if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor) and value.numel() <= MAX_CONSTANT:
            node.meta["lifted_constant"] = value


def _output_names(gm: fx.GraphModule) -> list[str | None]:
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return [arg.name if isinstance(arg, fx.Node) else None for arg in output.args[0]]
