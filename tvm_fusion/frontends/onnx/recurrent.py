"""LSTM, GRU and RNN of ONNX, one step after the other.

Before: y = LSTM(x, W, R, B)
After:  g = MatMul(x, W'); per step of the sequence MatMul, Add, Slice, Sigmoid, Tanh, Mul, ...

Does not handle: sequences of unknown length or of more than `MOST_STEPS`, activations with numbers
of their own, and forget gates that are coupled to input gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .nodes import Expansion, Nodes

MOST_STEPS = 256

_ACTIVATIONS = {
    "Sigmoid",
    "Tanh",
    "Relu",
    "Softsign",
    "Softplus",
    "Elu",
    "LeakyRelu",
    "HardSigmoid",
}
Step = Callable[["_Cell", str, tuple[str, ...]], tuple[str, ...]]


class _Cell:
    """One direction of a recurrent operator: its weights, and what a step computes with them."""

    def __init__(self, n: Nodes, gates: int, at: int, activations: Sequence[str]) -> None:
        self.n, self.activations = n, activations
        self.hidden = n.attributes.get("hidden_size") or n.shape(n.input(2))[-1]
        w, r = (n("Transpose", n.at(n.input(place), at)) for place in (1, 2))
        self.w, self.r, self.bias, self.recurrent_bias = w, r, "", ""
        if n.input(3):
            sizes = [gates * self.hidden] * 2
            self.bias, self.recurrent_bias = n.split(n.at(n.input(3), at), 0, sizes)
        self.peepholes: list[str] = []
        if n.node.op_type == "LSTM" and n.input(7):
            self.peepholes = n.split(n.at(n.input(7), at), 0, [self.hidden] * 3)

    def parts(self, x: str, count: int) -> list[str]:
        return self.n.split(x, -1, [self.hidden] * count)

    def active(self, which: int, x: str) -> str:
        clip = self.n.attributes.get("clip")
        if clip:
            ends = (self.n.constant(np.float32(end)) for end in (-clip, clip))
            x = self.n("Clip", x, *ends)
        return self.n(self.activations[which], x)

    def product(self, h: str, r: str, bias: str) -> str:
        found = self.n("MatMul", h, r)
        return self.n("Add", found, bias) if bias else found


def _rnn_step(cell: _Cell, x: str, state: tuple[str, ...]) -> tuple[str, ...]:
    product = cell.product(state[0], cell.r, cell.recurrent_bias)
    return (cell.active(0, cell.n("Add", x, product)),)


def _gru_step(cell: _Cell, x: str, state: tuple[str, ...]) -> tuple[str, ...]:
    n, (h,) = cell.n, state
    r = cell.parts(cell.r, 3)
    bias = n.split(cell.recurrent_bias, 0, [cell.hidden] * 3) if cell.recurrent_bias else [""] * 3
    x_update, x_reset, x_new = cell.parts(x, 3)
    update = cell.active(0, n("Add", x_update, cell.product(h, r[0], bias[0])))
    reset = cell.active(0, n("Add", x_reset, cell.product(h, r[1], bias[1])))
    if n.attributes.get("linear_before_reset"):
        old = n("Mul", reset, cell.product(h, r[2], bias[2]))
    else:
        old = cell.product(n("Mul", reset, h), r[2], bias[2])
    new = cell.active(1, n("Add", x_new, old))
    # (1 - update) * new + update * h
    return (n("Add", new, n("Mul", update, n("Sub", h, new))),)


def _lstm_step(cell: _Cell, x: str, state: tuple[str, ...]) -> tuple[str, ...]:
    n, (h, c) = cell.n, state
    both = n("Add", x, cell.product(h, cell.r, cell.recurrent_bias))
    into, out, forget, new = cell.parts(both, 4)

    def looking(gate: str, place: int, c: str) -> str:
        return n("Add", gate, n("Mul", cell.peepholes[place], c)) if cell.peepholes else gate

    kept = n("Mul", cell.active(0, looking(forget, 2, c)), c)
    c = n("Add", kept, n("Mul", cell.active(0, looking(into, 0, c)), cell.active(1, new)))
    return n("Mul", cell.active(0, looking(out, 1, c)), cell.active(2, c)), c


def _recurrent(gates: int, step: Step, activations: Sequence[str], states: int) -> Expansion:
    def expand(n: Nodes) -> bool:
        direction = n.attributes.get("direction", b"forward").decode()
        count = 2 if direction == "bidirectional" else 1
        chosen = [a.decode() for a in n.attributes.get("activations", [])] or [*activations] * count
        by_batch = bool(n.attributes.get("layout"))
        shape = n.shape(n.input(0))
        steps = shape[1 if by_batch else 0] if len(shape) == 3 else None
        if steps is None or steps > MOST_STEPS:
            n.refuse(f"a sequence of unknown length, or of more than {MOST_STEPS} steps")
        unknown = {*chosen} - _ACTIVATIONS
        if unknown or n.attributes.get("input_forget") or "activation_alpha" in n.attributes:
            n.refuse("activations of other kinds, or a forget gate coupled to the input gate")
        x = n.input(0)
        x = n("Transpose", x, perm=[1, 0, 2]) if by_batch else x
        results = []
        for at in range(count):
            own = chosen[at * len(activations) : (at + 1) * len(activations)]
            cell = _Cell(n, gates, at, own)
            backward = direction == "reverse" or at == 1
            results.append(_run(cell, step, x, steps, backward, states, by_batch, at))
        for place, kind in enumerate(zip(*results, strict=True)):
            if n.output(place):
                _joined(n, list(kind), place, by_batch)
        return True

    return expand


def _run(
    cell: _Cell,
    step: Step,
    x: str,
    steps: int,
    backward: bool,
    states: int,
    by_batch: bool,
    at: int,
) -> list[str]:
    """All steps of a direction: the hidden states, and the last of each state."""
    n = cell.n
    seen = n("MatMul", x, cell.w)
    seen = n("Add", seen, cell.bias) if cell.bias else seen
    state = tuple(_initial(n, 5 + i, at, by_batch, x, cell) for i in range(states))
    found: dict[int, str] = {}
    for t in reversed(range(steps)) if backward else range(steps):
        new = step(cell, n.at(seen, t), state)
        found[t] = new[0]
        if n.input(4):  # the lengths of sequences: what lies behind their ends is no step
            inside = n("Less", n.constant(np.int32(t)), n.input(4))
            inside = n("Unsqueeze", inside, n.integers(1))
            zero = n("Mul", new[0], n.constant(np.float32(0)))
            found[t] = n("Where", inside, new[0], zero)
            new = tuple(n("Where", inside, a, b) for a, b in zip(new, state, strict=True))
        state = new
    rows = [n("Unsqueeze", found[t], n.integers(0)) for t in range(steps)]
    return [n("Concat", *rows, axis=0), *state]


def _initial(n: Nodes, place: int, at: int, by_batch: bool, x: str, cell: _Cell) -> str:
    """A state before the first step: given, or zeros of (batch, hidden)."""
    given = n.input(place)
    if given:
        given = n("Transpose", given, perm=[1, 0, 2]) if by_batch else given
        return n.at(given, at)
    batch = n.shape(n.input(0))[0 if by_batch else 1]
    if batch is None:
        n.refuse("a batch of unknown size without an initial state; give one")
    return n.constant(np.zeros((batch, cell.hidden), "float32"))


def _joined(n: Nodes, directions: list[str], place: int, by_batch: bool) -> None:
    """An output of a recurrent operator, of what each direction gives."""
    axis = 1 if place == 0 else 0  # Y: (steps, directions, batch, hidden), Y_h: without steps
    parts = [n("Unsqueeze", one, n.integers(axis)) for one in directions]
    whole = n("Concat", *parts, axis=axis)
    orders = {0: [2, 0, 1, 3], 1: [1, 0, 2], 2: [1, 0, 2]}
    perm = orders[place] if by_batch else sorted(orders[place])
    n("Transpose", whole, perm=perm, result=n.output(place))


RECURRENT: dict[str, Expansion] = {
    "GRU": _recurrent(3, _gru_step, ("Sigmoid", "Tanh"), 1),
    "LSTM": _recurrent(4, _lstm_step, ("Sigmoid", "Tanh", "Tanh"), 2),
    "RNN": _recurrent(1, _rnn_step, ("Tanh",), 1),
}
