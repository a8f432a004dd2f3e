"""Matrix products whose rows are reduced in runs of columns by the same kernel."""

from tvm import relax
from tvm.relax import op

from .gemm_cases import HALF, case, gelu_of, residual, sigmoid


def runs(bb, x, width, reduce=op.sum, axes=(-1,)):
    """`reduce` over each run of `width` columns of x."""
    *rows, columns = x.ty.shape
    view = bb.emit(op.reshape(x, (*rows, int(columns) // width, width)))
    return bb.emit(reduce(view, axis=list(axes)))


def squares(bb, h, width):
    """Sums of squares over runs of columns, in float32."""
    wide = bb.emit(op.astype(h, "float32")) if str(h.ty.dtype) != "float32" else h
    return runs(bb, bb.emit(op.multiply(wide, wide)), width)


def residual_squares(width):
    """h = x @ w + r and the sums of its squares."""

    def emit(bb, x, w, r):
        h = bb.emit(residual(bb, x, w, r))
        return relax.Tuple([h, squares(bb, h, width)])

    return emit


def squares_only(width):
    """The sums of squares of x @ w, which is not stored."""
    return lambda bb, x, w: squares(bb, bb.emit(op.matmul(x, w)), width)


def maxima(width):
    """gelu(x @ w + b), the maxima of its runs, and their sums of squares."""

    def emit(bb, x, w, b):
        product = bb.emit(op.add(bb.emit(op.matmul(x, w)), b))
        h = bb.emit(op.nn.gelu(product))
        return relax.Tuple([runs(bb, h, width, op.max), h, squares(bb, h, width)])

    return emit


def pair(width):
    """silu(x @ g) * (x @ u) and the sums of its squares."""

    def emit(bb, x, g, u):
        gate = bb.emit(op.nn.silu(bb.emit(op.matmul(x, g))))
        h = bb.emit(op.multiply(gate, bb.emit(op.matmul(x, u))))
        return relax.Tuple([h, squares(bb, h, width)])

    return emit


def siblings(bb, x, q, k, v):
    """Three products; two of them with statistics of each head of 64."""
    a, b, c = (bb.emit(op.matmul(x, w)) for w in (q, k, v))
    return relax.Tuple([a, b, c, squares(bb, a, 64), squares(bb, b, 64)])


def runs_of(x, width):
    """[..., n * width] -> [..., n, width]."""
    return x.reshape(*x.shape[:-1], -1, width)


def squares_of(x, width):
    """Sums of squares over runs of columns."""
    return (runs_of(x, width) ** 2).sum(-1)


def with_squares(width, h):
    """h and the sums of its squares."""
    return [h, squares_of(h, width)]


def maxima_of(width, x, w, b):
    """The reference of `maxima`."""
    h = gelu_of(x @ w + b)
    return [runs_of(h, width).max(-1), h, squares_of(h, width)]


def gated(x, g, u):
    """silu(x @ g) * (x @ u)."""
    return (x @ g) * sigmoid(x @ g) * (x @ u)


def residual_case(m, n, k, width, dtype=HALF):
    """`residual_squares` for one size."""
    shapes = [(m, k), (k, n), (m, n)]
    emit = residual_squares(width)
    name = f"residual, {m} x {n}, runs of {width}"
    return case(name, emit, shapes, lambda x, w, r: with_squares(width, x @ w + r), dtype)


PARTIAL_CASES = [
    residual_case(136, 256, 256, 128),
    residual_case(136, 192, 256, 64),  # a tile of 128 or 256 reaches beyond the last run
    residual_case(70, 384, 192, 128, "bfloat16"),
    case(
        "squares alone",
        squares_only(128),
        [(136, 256), (256, 256)],
        lambda x, w: [squares_of(x @ w, 128)],
    ),
    case(
        "maxima and squares",
        maxima(64),
        [(72, 256), (256, 192), (192,)],
        lambda x, w, b: maxima_of(64, x, w, b),
    ),
    case(
        "gate and up",
        pair(64),
        [(72, 256), (256, 192), (256, 192)],
        lambda x, g, u: with_squares(64, gated(x, g, u)),
    ),
    case(
        "batch of rows",
        residual_squares(64),
        [(2, 70, 192), (192, 128), (2, 70, 128)],
        lambda x, w, r: with_squares(64, x @ w + r),
    ),
    case(
        "siblings",
        siblings,
        [(136, 192), (192, 128), (192, 64), (192, 192)],
        lambda x, q, k, v: [
            *(x @ w for w in (q, k, v)),
            *(squares_of(x @ w, 64) for w in (q, k)),
        ],
    ),
]
