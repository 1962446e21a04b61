"""Merges of split-KV partials."""

from __future__ import annotations

import torch

from .attention_match import AttentionMatch
from .attention_sites import Explorer, Site
from .context import Context
from .descent import _PRODUCTS, Path, Reach
from .refusal import Refused


def merges_partials(sites: list[Site]) -> bool:
    """Whether the source spells a merge of partial attentions: every part is rescaled by a weight of its own, all the
    same number of times. (A running softmax rescales earlier tiles more often than later ones; branches under one
    common softmax are not rescaled at all.)"""
    paths = list(dict.fromkeys(site.path for site in sites))
    if len(paths) < 2:
        return False
    common = 0
    while all(len(p) > common for p in paths) and len({p[common] for p in paths}) == 1:
        common += 1
    counts = {_rescalings(path[common:]) for path in paths}
    return len(counts) == 1 and counts.pop() > 0


def _rescalings(path: Path) -> int:
    return sum(step.kind == "factor" or step.node.target in _PRODUCTS for step in path)


def recognise_partials(explorer: Explorer, opaque: list[Reach], context: Context) -> AttentionMatch | Refused:
    """The merge of partials that are themselves opaque."""
    return Refused("fmha", "no attention found", explorer.output, silent=True)


__all__ = ["merges_partials", "recognise_partials", "torch"]
