"""What a step of a recurrent layer computes for one hidden unit, by the equations of PyTorch's
`nn.LSTM`, `nn.GRU` and `nn.RNN`; gates lie one after the other, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from tvm import tirx
from tvm.ir import Expr

from ..program.expr import constant, dtype_of


class Cell(Enum):
    """Kinds of recurrent layers."""

    LSTM = "lstm"
    GRU = "gru"
    TANH = "rnn_tanh"
    RELU = "rnn_relu"

    @property
    def gates(self) -> int:
        """Products of the hidden state that a unit takes."""
        return {Cell.LSTM: 4, Cell.GRU: 3}.get(self, 1)

    @property
    def has_memory(self) -> bool:
        """Whether a second state, which no product reads, is carried along."""
        return self is Cell.LSTM

    @property
    def has_bias(self) -> bool:
        """Whether a bias of the last gate's product stays apart from the input: the reset gate
        scales both.
        """
        return self is Cell.GRU


def step(
    cell: Cell,
    x: Sequence[Expr],
    product: Sequence[Expr],
    bias: Expr | None,
    hidden: Expr,
    memory: Expr | None,
    bind: Callable[[Expr], Expr] = lambda value: value,
) -> tuple[Expr, Expr | None]:
    """The next hidden state and memory.

    Parameters
    ----------
    x, product : sequence of Expr
        Of each gate, what comes from the input (with all biases that can be added before) and from
        the hidden state.
    bias, memory : Expr or None
        As the cell has them (`Cell.has_bias`, `Cell.has_memory`).
    hidden : Expr
        All are of one type of floats.
    bind : callable, optional
        Gives the results, and values on the way to them, names.
    """
    if cell is Cell.LSTM:
        into, forget, new, out = (a + b for a, b in zip(x, product, strict=True))
        kept = bind(_sigmoid(forget)) * memory
        memory = bind(kept + bind(_sigmoid(into)) * bind(tirx.tanh(new)))
        return bind(bind(_sigmoid(out)) * bind(tirx.tanh(memory))), memory
    if cell is Cell.GRU:
        reset, update = (bind(_sigmoid(x[n] + product[n])) for n in range(2))
        new = bind(tirx.tanh(x[2] + reset * (product[2] + bias)))
        return bind(new + update * (hidden - new)), None
    total = bind(x[0] + product[0])
    if cell is Cell.TANH:
        return bind(tirx.tanh(total)), None
    zero = constant(0, dtype_of(total))
    return bind(tirx.Select(total < zero, zero, total)), None  # a NaN stays


def _sigmoid(x: Expr) -> Expr:
    return tirx.call_intrin(dtype_of(x), "tirx.sigmoid", x)
