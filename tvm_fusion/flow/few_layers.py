"""A function with a few of its equal layers: what pays in a model is found out in a short one.

    words | a b c | a b c | a b c | ... | a b c | a b c | scores
    words | a b c | a b c               | a b c | a b c | scores        each of the inner two stands
                                                                        for a half of those left out

Layers are runs of bindings that say the same again and again (`plan.regions.repeats`), each with
weights of its own. What is planned of the short function is charged for all that it stands for.

Does not handle (there is no short form): functions of several blocks, with branches or with casts
of shapes, and those of fewer than `LEAST` layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call, Expr, GenericConst
from tvm.relax import Var

from ..ir.graph import FusionGraph, Op, OpKind, Tensor
from ..ir.weights import numbers
from ..plan.plan import FusionPlan
from ..plan.regions.repeats import Repeat, find_repeats

HEAD = TAIL = 2
"""Layers that are kept in front and behind: one beside what is no layer, and one between layers."""

LEAST = 2 * (HEAD + TAIL)
"""Layers of a function that is worth shortening."""


@dataclass(frozen=True, eq=False, slots=True)
class FewLayers:
    """A module whose `main` has a few layers of another's.

    Attributes
    ----------
    mod : tvm.IRModule
    stands_for : mapping of str to float
        How many bindings of the whole function each one stands for, by the name of its variable.
    """

    mod: tvm.IRModule
    stands_for: Mapping[str, float]

    def counts(self, graph: FusionGraph, plan: FusionPlan) -> Iterator[float]:
        """How many launches of the whole function each group of a plan stands for; `graph` is that
        of the short function, or of what a rewrite made of it.
        """
        of, last = {}, 1.0
        for op in graph.ops:  # what has a new name stands behind what it belongs to
            last = of[op.name] = self._of(op.name, last)
        return (of[group.ops[0]] for group in plan.groups)

    def _of(self, name: str, before: float) -> float:
        """Parts of an operator are called after it: `lv7` became `lv7_part` and `lv7`."""
        while name and name not in self.stands_for:
            name = name.rpartition("_")[0]
        return self.stands_for.get(name, before)


def few_layers(mod: tvm.IRModule) -> FewLayers | None:
    """The module with a few of the layers of its `main`; None where it has not that many."""
    main = mod["main"]
    blocks = main.body.blocks if isinstance(main.body, relax.SeqExpr) else ()
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
        return None
    bindings = list(blocks[0].bindings)
    ends = _has_results(bindings, main.body.body)
    read = _Reader.of(main, bindings[:-1] if ends else bindings)
    repeats = [] if read is None else find_repeats(read.graph(), tuple(read.numbers), LEAST)
    if not repeats:
        return None
    kept, same = _kept(bindings, repeats[0])
    found = mod.clone()
    found.update_func(mod.get_global_var("main"), _shortened(main, kept, same))
    left_out = repeats[0].count - HEAD - TAIL
    inner = {HEAD - 1, repeats[0].count - TAIL}
    counts = {
        b.var.name: 1 + left_out / len(inner) * (repeats[0].period_of(i) in inner)
        for i, b in enumerate(bindings)
        if i in kept
    }
    return FewLayers(found, counts)


def _has_results(bindings: list[relax.Binding], result: Expr) -> bool:
    """Whether the last binding puts results together: it reads layers, and computes nothing."""
    last = bindings[-1] if bindings else None
    return isinstance(getattr(last, "value", None), relax.Tuple) and last.var.same_as(result)


def _kept(
    bindings: list[relax.Binding], repeat: Repeat
) -> tuple[dict[int, relax.Binding], dict[Var, Var]]:
    """The bindings that stay, by number, and for each variable that goes the one that is read in
    its place: that of the last layer in front.
    """
    first = repeat.start + HEAD * repeat.period
    end = repeat.end - TAIL * repeat.period
    kept = {i: b for i, b in enumerate(bindings) if not first <= i < end}
    last = bindings[first - repeat.period : first]
    gone = bindings[first:end]
    return kept, {b.var: last[i % repeat.period].var for i, b in enumerate(gone)}


def _shortened(
    main: relax.Function, kept: Mapping[int, relax.Binding], same: Mapping[Var, Var]
) -> relax.Function:
    def mapped(expr: Expr) -> Expr:
        return tvm_ffi.structural_map(expr, (Var, lambda var: same.get(var, var)))

    bindings = [relax.VarBinding(b.var, mapped(b.value)) for b in kept.values()]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], mapped(main.body.body))
    relax.expr._update_type(body, main.body.ty)
    return relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)


class _Reader:
    """The bindings of a block as operators that nobody can read: what they are, and what they take.

    Attributes
    ----------
    numbers : list of int
        What each does, the same for equal ones: operator, attributes, types, small numbers.
    """

    def __init__(self, params: list[Var]) -> None:
        self.numbers: list[int] = []
        self._kinds: dict[tuple, int] = {}
        self._inputs: list[tuple[int, ...]] = []
        self._producers: list[int | None] = []
        self._tensors: dict[object, int] = {}
        for param in params:
            self._tensor(param, None)

    @classmethod
    def of(cls, main: relax.Function, bindings: list[relax.Binding]) -> _Reader | None:
        """None where a binding cannot be read."""
        found = cls(list(main.params))
        return found if all(map(found._add, bindings)) else None

    def graph(self) -> FusionGraph:
        """The bindings as a graph, of which no more is known than who reads what."""
        consumers: list[list[int]] = [[] for _ in self._producers]
        for number, inputs in enumerate(self._inputs):
            for tensor in inputs:
                consumers[tensor].append(number)
        made = {p: t for t, p in enumerate(self._producers) if p is not None}
        ops = [
            Op(i, "", "", OpKind.OPAQUE, inputs, (made[i],))
            for i, inputs in enumerate(self._inputs)
        ]
        tensors = [
            Tensor(t, "", (), "", producer, tuple(consumers[t]))
            for t, producer in enumerate(self._producers)
        ]
        return FusionGraph("main", tuple(ops), tuple(tensors), (), ())

    def _tensor(self, key: object, producer: int | None) -> int:
        if key not in self._tensors:
            self._tensors[key] = len(self._producers)
            self._producers.append(producer)
        return self._tensors[key]

    def _add(self, binding: relax.Binding) -> bool:
        if not isinstance(binding, relax.VarBinding):
            return False
        value, inputs, words = binding.value, [], [type(binding.var)]
        if isinstance(value, Call):
            words += [value.op, _known(value.attrs)]
            parts = list(value.args)
        else:
            parts = [value]
        if not all(self._take(part, inputs, words) for part in parts):
            return False
        words.append(_known(value.ty))
        number = len(self.numbers)
        self._inputs.append(tuple(dict.fromkeys(inputs)))
        self._tensor(binding.var, number)
        self.numbers.append(self._kinds.setdefault(tuple(words), len(self._kinds)))
        return True

    def _take(self, part: Expr, inputs: list[int], words: list[object]) -> bool:
        """Reads a part of a value: tensors go to `inputs`, all else to `words`."""
        if isinstance(part, Var) and part not in self._tensors:  # a size
            words.append(part)
        elif isinstance(part, Var):
            inputs.append(self._tensors[part])
            words.append(inputs.index(inputs[-1]))
        elif isinstance(part, GenericConst):
            if not isinstance(part.ty, relax.TensorType):
                return False
            words.append(_known(part.ty))
            if part.ty.ndim == 0:
                words.append(numbers(part).tobytes())
            else:
                inputs.append(self._tensor(int(part.value.data_ptr()), None))
                words.append(inputs.index(inputs[-1]))
        elif isinstance(part, relax.Tuple):
            words.append(len(part.fields))
            return all(self._take(field, inputs, words) for field in part.fields)
        elif isinstance(part, relax.TupleGetItem):
            words.append(part.index)
            return self._take(part.tuple_value, inputs, words)
        elif isinstance(part, Call | relax.If | relax.Function):
            return False
        else:
            words.append(_known(part))
        return True


def _known(node: object) -> tvm_ffi.StructuralKey:
    return tvm_ffi.StructuralKey(node)
