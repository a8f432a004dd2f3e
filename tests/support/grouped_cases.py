"""Graphs with several matrix products that share little or nothing, and float64 references."""

from tvm import relax
from tvm.relax import op

from .gemm_cases import gate_up, sigmoid


def separate(bb, *tensors):
    """x @ w of each pair."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return relax.Tuple([bb.emit(op.matmul(x, w)) for x, w in pairs])


def projections(bb, x, *weights):
    """x @ w of each weight."""
    return relax.Tuple([bb.emit(op.matmul(x, w)) for w in weights])


def experts(bb, *tensors):
    """silu(x @ gate) * (x @ up) of each expert's tokens and weights."""
    triples = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    return relax.Tuple([bb.emit(gate_up(bb, x, g, u)) for x, g, u in triples])


def experts_of(*tensors):
    """`experts` in NumPy."""
    triples = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    return [(x @ g) * sigmoid(x @ g) * (x @ u) for x, g, u in triples]


def mixture(bb, *tensors):
    """The whole feed-forward of each expert: tokens, gate, up and down."""
    count = len(tensors) // 4
    hidden = [bb.emit(gate_up(bb, *tensors[4 * i : 4 * i + 3])) for i in range(count)]
    down = [bb.emit(op.matmul(h, tensors[4 * i + 3])) for i, h in enumerate(hidden)]
    return relax.Tuple(down)


def mixture_one_by_one(bb, *tensors):
    """As `mixture`, each expert to its end before the next."""
    results = []
    for i in range(0, len(tensors), 4):
        x, g, u, d = tensors[i : i + 4]
        results.append(bb.emit(op.matmul(bb.emit(gate_up(bb, x, g, u)), d)))
    return relax.Tuple(results)


def mixture_of(*tensors):
    """`mixture` in NumPy."""
    results = []
    for i in range(0, len(tensors), 4):
        x, g, u, d = tensors[i : i + 4]
        results.append(((x @ g) * sigmoid(x @ g) * (x @ u)) @ d)
    return results


def scaled(bb, x, factor):
    return bb.emit(op.multiply(x, relax.const(factor, str(x.ty.dtype))))


def lora_b(bb, *tensors):
    """y + a @ b * 0.5 of each (a, b, y): the second half of a low-rank update."""
    triples = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    results = [bb.emit(op.add(y, scaled(bb, bb.emit(op.matmul(a, b)), 0.5))) for a, b, y in triples]
    return relax.Tuple(results)


def lora(bb, x, *weights):
    """x @ w + (x @ a) @ b * 0.5 of each (w, a, b)."""
    results = []
    for w, a, b in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
        low = bb.emit(op.matmul(bb.emit(op.matmul(x, a)), b))
        results.append(bb.emit(op.add(bb.emit(op.matmul(x, w)), scaled(bb, low, 0.5))))
    return relax.Tuple(results)


def lora_of(x, *weights):
    """`lora` in NumPy."""
    triples = zip(weights[::3], weights[1::3], weights[2::3], strict=True)
    return [x @ w + (x @ a) @ b * 0.5 for w, a, b in triples]


def packed_mixture(counts):
    """Emits `mixture` of rows of one packed tensor, in the order of the experts: x, then gate, up
    and down of each, by columns; the results stand below each other.
    """
    ends = [sum(counts[:i]) for i in range(1, len(counts))]

    def emit(bb, x, *weights):
        weights = [bb.emit(op.permute_dims(w, (1, 0))) for w in weights]
        parts = bb.emit(op.split(x, ends, 0))
        results = []
        for i in range(len(counts)):
            gate, up, down = weights[3 * i : 3 * i + 3]
            hidden = bb.emit(gate_up(bb, bb.emit(parts[i]), gate, up))
            results.append(bb.emit(op.matmul(hidden, down)))
        return op.concat(results, 0)

    return emit
