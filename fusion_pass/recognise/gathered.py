"""Key rows that are picked from a pool by indices: the same attention without writing the picked rows to memory.

Proved by value like everything else: for random indices, the row that a key reads is ``pool[first + index]``. Which
keys count stays the business of the masks: where they hide a key, the index is written as -1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx

from ..elements.loads import INDEXED, load_index
from ..elements.moves import sources
from ..elements.numeric import Leaf, Numeric, Unevaluated, random_leaf
from ..fx_access import args_of
from .attention_bindings import Binder, Binding
from .attention_match import Gathered, Operand
from .descent import Reach, fit, is_tensor
from .paths import Step, Unfollowed, advance, replay
from .region import constant_only

aten = torch.ops.aten
MOST_POOLS = 2
SAMPLES = 64
INTEGERS = (torch.int32, torch.int64)


class _Asked(Exception):
    """The index tensor that a load reads, and where."""

    def __init__(self, node: fx.Node, index: torch.Tensor):
        super().__init__(node.name)
        self.node, self.index = node, index


def recognise_gathered(binder: Binder, bindings: list[Binding],
                       constants: Callable[[fx.Node], object]) -> tuple[Gathered, ...]:
    """The pools and indices of all keys, or () when some of the keys are no gathered rows."""
    found = []
    for binding in bindings[:MOST_POOLS + 1]:
        try:
            gathered = _Examination(binder, binding, constants).gathered()
        except (Unfollowed, Unevaluated):
            gathered = None
        if gathered is None:
            return ()
        found.append(gathered)
    return tuple(found) if len(found) <= MOST_POOLS else ()


class _Examination:
    def __init__(self, binder: Binder, binding: Binding, constants: Callable[[fx.Node], object]):
        self.binder, self.binding, self.constants = binder, binding, constants
        self.sizes, self.explorer = binder.sizes, binder.explorer
        self.extents = [*(a.size for a in binder.axes.tokens), binding.segment.count]
        self.channels = binder.axes.channels.size

    def rows(self, coordinates: list[torch.Tensor], channel: int = 0) -> torch.Tensor:
        """Elements of the row node at (tokens.., key)."""
        axes = self.binding.piece.rows.axes
        start = self.binding.piece.rows.offset + channel * axes[-1].stride
        return sum((c * a.stride for c, a in zip(coordinates, axes)), torch.full_like(coordinates[0], start))

    def load(self) -> Reach | None:
        """The data-dependent load behind the row node: through moves and zero-filling of masked rows."""
        zero = torch.zeros(1, dtype=torch.int64)
        here = Reach(self.binding.piece.rows.node, zero, self.rows([zero] * len(self.extents)), ())
        while here.node.target not in INDEXED:
            node = here.node
            if node.op != "call_function":
                return None
            if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and self._hidden(args_of(node)[1]):
                step = Step(node, args_of(node)[0], "point")
            else:
                pieces = sources(node, here.index, self.sizes)
                if pieces is None or len(pieces) != 1 or not isinstance(pieces[0].source, fx.Node):
                    return None
                step = Step(node, pieces[0].source, "move")
            here = Reach(step.operand, zero, advance(step, here.index, self.sizes), (*here.path, step))
        return here

    def _hidden(self, filled: fx.Node) -> bool:
        """Whether the rows that are filled over are rows that a mask of the scores hides anyway."""
        ends = self.explorer.descent.chain(filled, torch.zeros(1, dtype=torch.int64))
        return any(mask.kind == "drop" and mask.operand.node is end.node
                   for mask in self.binding.piece.masks for end in ends)

    def asked(self, load: Reach, coordinates: list[torch.Tensor]) -> tuple[fx.Node, torch.Tensor]:
        """The index tensor that the load reads at the coordinates, and where."""
        def values(node: fx.Node, index: torch.Tensor) -> torch.Tensor:
            if constant_only(node):
                return Numeric(self.sizes, {}, self.constants).values(node, index)
            raise _Asked(node, index)
        try:
            load_index(load.node, replay(load.path, self.rows(coordinates), self.sizes), self.sizes, values)
        except _Asked as found:
            return found.node, found.index
        raise Unfollowed("no index")

    def indices(self, load: Reach) -> Operand | None:
        """The index tensor with the axes (tokens.., keys)."""
        zero = torch.zeros(1, dtype=torch.int64)
        node, index = self.asked(load, [zero] * len(self.extents))
        if not is_tensor(node) or node.meta["val"].dtype not in INTEGERS:
            return None
        for way in reversed(self.explorer.descent.chain(node, index)):
            family = fit(lambda *c, way=way: replay(way.path, self.asked(load, list(c))[1], self.sizes), self.extents)
            if family is None:
                continue
            axes = [a.with_stride(s) for a, s in zip(self.binder.axes.tokens, family.strides)]
            size, stride = self.extents[-1], family.strides[-1]
            axes.append(type(axes[0] if axes else self.binder.axes.heads)(
                size, stride, self.binder.key_size_from(way.node, stride, size)))
            return Operand(way.node, family.offset, tuple(axes))
        return None

    def gathered(self) -> Gathered | None:
        if any(mask.kind == "add" for mask in self.binding.piece.masks):
            return None
        load = self.load()
        if load is None:
            return None
        indices = self.indices(load)
        if indices is None:
            return None
        shape = self.sizes.shape(args_of(load.node)[0])
        random = random_leaf(41)
        limit = max(2, min((s for s in shape[:-1] if s > 1), default=2))

        def index_values(index: torch.Tensor) -> torch.Tensor:
            return torch.floor((random(index) + 1) * 0.5 * limit).to(torch.int64)

        def address(leaf: Leaf, coordinates: list[torch.Tensor], channel: int) -> tuple[fx.Node, torch.Tensor]:
            engine = Numeric(self.sizes, {indices.node: leaf}, self.constants)
            at = replay(load.path, self.rows(coordinates, channel), self.sizes)
            source, elements = load_index(load.node, at, self.sizes, engine.values)
            last = self.explorer.descent.chain(source, elements)[-1]
            return last.node, last.index

        generator = torch.Generator().manual_seed(5)
        where = [torch.randint(0, e, (SAMPLES,), generator=generator) for e in self.extents]
        for axis, extent in enumerate(self.extents):
            where[axis][0], where[axis][1] = 0, extent - 1
        pool, _ = address(torch.zeros_like, where, 0)
        first = fit(lambda *c: address(torch.zeros_like, list(c), 0)[1], self.extents)
        if first is None or first.strides[-1] or any(n % self.channels for n in (
                first.offset, *first.strides, self.sizes.numel(pool))):
            return None
        tokens = self.binder.axes.tokens
        if any(step and axis.size_from is not None for step, axis in zip(first.strides, tokens)):
            return None
        chosen = index_values(sum((c * a.stride for c, a in zip(where, indices.axes)),
                                  torch.full_like(where[0], indices.offset)))
        for channel in (0, self.channels // 2, self.channels - 1):
            node, elements = address(index_values, where, channel)
            expected = first.offset + channel + self.channels * chosen + sum(
                (c * s for c, s in zip(where, first.strides)), torch.zeros_like(chosen))
            if node is not pool or bool((elements != expected).any()):
                return None
        return Gathered(pool, indices, self._wrapped(load), first.offset // self.channels,
                        tuple(s // self.channels for s in first.strides[:-1]))

    def _wrapped(self, load: Reach) -> int:
        """``x[i]`` counts negative indices from the end: the length that they are counted from (else 0)."""
        if load.node.target is not aten.index.Tensor:
            return 0
        dims = [d for d, i in enumerate(args_of(load.node)[1]) if i is not None and not constant_only(i)]
        length = args_of(load.node)[0].meta["val"].shape[dims[0]] if len(dims) == 1 else None
        if not isinstance(length, int):
            raise Unfollowed("negative indices into an axis of symbolic size")
        return length
