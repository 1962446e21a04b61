# SPDX-License-Identifier: Apache-2.0
"""Malformed and merely unusual graphs: real chains with random damage. ``rewrite`` must never raise, never leave a
graph that FX's lint refuses, and never change what a graph computes that still runs (with metadata that is missing, or
true).
"""

import copy
import logging
import random

import chains
import pytest
import torch
from fuzzing import cases, tried
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fusion_pass

aten = torch.ops.aten
F32 = torch.float32
_, KV, MASK, SINK, COS, SIN, WEIGHT = chains.inputs(dtype=F32)
BASES = {
    "attention": (chains.chain, chains.inputs(dtype=F32)),
    "quantised": (chains.quantised_chain, chains.inputs(dtype=F32)),
    "batched": (chains.chain, chains.inputs(batch=2, tokens=3, dtype=F32)),
    "rotation": (chains.opaque, (chains.inputs(dtype=F32)[0], COS, SIN, WEIGHT)),
    "merge": (chains.merged, chains.merge_inputs()),
}
SIMILAR = [
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default),
    (aten.exp.default, aten.abs.default, aten.neg.default, aten.cos.default),
    (aten.amax.default, aten.amin.default),
    (aten.bmm.default, aten.matmul.default),
]
_graphs: dict[str, torch.fx.GraphModule] = {}


def base(name):
    if name not in _graphs:
        function, args = BASES[name]
        _graphs[name] = chains.aot(function, args)
    return copy.deepcopy(_graphs[name])


class Damage:
    """Random changes to a graph that keep it a graph: arguments come before their users."""

    def __init__(self, gm, seed):
        self.gm, self.random = gm, random.Random(seed)

    def calls(self):
        return [n for n in self.gm.graph.nodes if n.op == "call_function"]

    def earlier(self, node, like):
        """A node before ``node``, mostly one that could stand where ``like`` stands."""
        before = []
        for other in self.gm.graph.nodes:
            if other is node:
                break
            before.append(other)
        value = like.meta.get("val")
        if isinstance(value, torch.Tensor) and self.random.random() < 0.8:
            same = [n for n in before if isinstance(v := n.meta.get("val"), torch.Tensor) and n is not like
                    and v.shape == value.shape and v.dtype == value.dtype]  # fmt: skip
            before = same or before
        return self.random.choice(before) if before else like

    def delete(self):
        node = self.random.choice(self.calls())
        node.replace_all_uses_with(self.earlier(node, node))
        self.gm.graph.erase_node(node)

    def retarget(self):
        node = self.random.choice([n for n in self.calls() if n.all_input_nodes])
        old = self.random.choice(node.all_input_nodes)
        node.replace_input_with(old, self.earlier(node, old))

    def swap(self):
        node = self.random.choice([n for n in self.calls() if len(n.args) > 1])
        first, second, *rest = node.args
        node.args = (second, first, *rest)

    def number(self):
        def changed(value):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and self.random.random() < 0.5:
                return self.random.choice([value + 1, value - 1, -value, 0, value * 2])
            return [changed(v) for v in value] if isinstance(value, (list, tuple)) else value

        candidates = [n for n in self.calls() if any(isinstance(a, (int, float, list, tuple)) for a in n.args)]
        node = self.random.choice(candidates)
        node.args = tuple(changed(a) for a in node.args)

    def operator(self):
        groups = [(n, group) for n in self.calls() for group in SIMILAR if n.target in group]
        if groups:
            node, group = self.random.choice(groups)
            node.target = self.random.choice(group)

    def reader(self):
        """Somebody else reads an intermediate value."""
        output = self.gm.graph.find_nodes(op="output")[0]
        values = output.args[0]
        extra = self.random.choice(self.calls())
        output.args = ((*values, extra) if isinstance(values, (list, tuple)) else (values, extra),)

    def repeat(self):
        node = self.random.choice(self.calls())
        with self.gm.graph.inserting_after(node):
            twin = self.gm.graph.node_copy(node)
        users = list(node.users)
        if users:
            self.random.choice(users).replace_input_with(node, twin)

    def lose_meta(self):
        for node in self.random.sample(list(self.gm.graph.nodes), 3):
            node.meta.pop("val", None)

    def wrong_meta(self):
        node = self.random.choice(self.calls())
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            with value.fake_mode if hasattr(value, "fake_mode") else torch.no_grad():
                node.meta["val"] = self.random.choice([
                    lambda: value.new_empty((*value.shape, 2)), lambda: value.new_empty(value.shape[:-1]),
                    lambda: value.to(torch.float16), lambda: [value, value], lambda: None])()  # fmt: skip


SOUND = ("delete", "retarget", "swap", "number", "operator", "reader", "repeat")


def sound_meta(gm, args):
    """Metadata as a trace would give it; False when the graph does not run."""
    old = {n: dict(n.meta) for n in gm.graph.nodes}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            FakeTensorProp(gm, mode).propagate(*args)
        return True
    except Exception:
        for node, meta in old.items():
            node.meta = meta
        return False


def bits(x):
    return torch.empty(x.shape, dtype=x.dtype).copy_(x).view(torch.uint8)


def results(gm, args):
    with torch.no_grad():
        found = torch.fx.Interpreter(gm).run(*[a.clone() for a in args])
    return found if isinstance(found, (list, tuple)) else [found]


@cases(60)
@given(
    name=st.sampled_from(sorted(BASES)), seed=st.integers(0, 2**32), many=st.sampled_from([1, 1, 1, 2, 3, 6]),
    kinds=st.lists(st.sampled_from([*SOUND, "lose_meta", "wrong_meta"]), min_size=1, max_size=6),
)  # fmt: skip
def test_damaged_graphs(name, seed, many, kinds):
    args = BASES[name][1]
    gm = base(name)
    damage = Damage(gm, seed)
    for kind in kinds[:many]:
        if kind in SOUND:
            getattr(damage, kind)()
    gm.graph.lint()
    gm.recompile()
    runs = sound_meta(gm, args)
    for kind in kinds[:many]:
        if kind not in SOUND:
            getattr(damage, kind)()
    truthful = "wrong_meta" not in kinds[:many]
    want = None
    if runs:
        try:
            want = results(copy.deepcopy(gm), args)
        except Exception:  # the numbers of another operator can be out of range
            want = None
    report = fusion_pass.rewrite(gm)
    tried("damaged graphs")
    if report.fused:
        tried("damaged graphs that were fused")
    gm.graph.lint()
    failures = [note for note in report.notes if "the pass failed" in note]
    if any("left as it came" in note for note in report.notes):
        assert not report.fused
    if failures:
        tried("damaged graphs that the pass gave up on")
    if truthful and runs:
        assert not failures, failures
    if want is None or not truthful:  # nobody can tell that metadata lies, and the pass reads nothing else
        return
    got = results(gm, args)
    assert len(got) == len(want)
    for g, w in zip(got, want):
        if not isinstance(w, torch.Tensor):
            assert g == w
            continue
        assert g.shape == w.shape and g.dtype == w.dtype, (g.shape, w.shape, g.dtype, w.dtype)
        if not report.fused:
            assert torch.equal(bits(g), bits(w))
        else:
            g, w = g.double(), w.double()
            finite = torch.isfinite(w)
            error = (g - w)[finite].norm() / w[finite].norm().clamp_min(1e-30)
            assert error < (3e-2 if name == "quantised" else 1e-4), f"{error:.3g} off after {report}"


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, logger="fusion_pass")


def test_the_undamaged_ones_are_fused():
    """Or the test above would compare graphs with themselves."""
    for name in BASES:
        gm = base(name)
        assert len(fusion_pass.rewrite(gm).fused) == 1, name
