"""Statements that are layers: norms, softmaxes, losses, products, convolutions, attention."""

from __future__ import annotations

from .draw import Draft, Step, dtype_name
from .torch_program import Statement

LOSS = (
    "F.mse_loss({0}, {1}%s)",
    "F.l1_loss({0}, {1}%s)",
    "F.smooth_l1_loss({0}, {1}%s)",
    "F.huber_loss({0}, {1}%s)",
    "F.binary_cross_entropy_with_logits({0}, torch.sigmoid({1})%s)",
    "F.kl_div(F.log_softmax({0}, -1), torch.softmax({1}, -1)%s)",
)


def softmax(d: Draft) -> Statement | None:
    """A softmax over any axis."""
    x = d.floating((1, 2, 3, 4))
    if x is None:
        return None
    code = d.choice(("torch.softmax({0}, %d)", "F.log_softmax({0}, %d)", "F.softmin({0} * 2, %d)"))
    return d.statement(code % d.axis(x), x)


def norm(d: Draft) -> Statement | None:
    """A norm over the last axes."""
    x = d.floating((2, 3, 4))
    if x is None:
        return None
    count = d.choice((1, 1, 2)) if d.own[x].ndim > 2 else 1
    over = d.shape(x)[-count:]
    weight = d.input(over, dtype_name(d.own[x].dtype))
    return d.statement(
        d.choice(
            (
                f"F.layer_norm({{0}}, {over})",
                f"F.layer_norm({{0}}, {over}, {{1}}, {{1}})",
                f"F.rms_norm({{0}}, {over}, {{1}}, 1e-5)",
                f"F.normalize({{0}}, dim={d.axis(x)})",
            )
        ),
        x,
        weight,
    )


def norm_of_channels(d: Draft) -> Statement | None:
    """A norm of channels, which are the second axis."""
    x = d.floating((3, 4))
    if x is None:
        return None
    channels = d.shape(x)[1]
    groups = d.choice([g for g in range(1, channels + 1) if channels % g == 0])
    weight = d.input((channels,), dtype_name(d.own[x].dtype))
    return d.statement(
        d.choice(
            (
                f"F.group_norm({{0}}, {groups}, {{1}})",
                "F.instance_norm({0})",
                "F.batch_norm({0}, {1}, {1}.abs() + 0.5, {1}, {1})",
            )
        ),
        x,
        weight,
    )


def loss(d: Draft) -> Statement | None:
    """A loss of two values, averaged or not."""
    x = d.floating((1, 2, 3))
    if x is None:
        return None
    way = d.choice(("", ', reduction="none"', ', reduction="sum"'))
    return d.statement(d.choice(LOSS) % way, x, d.alike(x))


def classes(d: Draft) -> Statement | None:
    """A loss of classes that are inputs."""
    x = d.floating((2,))
    if x is None:
        return None
    rows, columns = d.shape(x)
    target = d.input((rows,), "int64", below=columns)
    way = d.choice(("", ', reduction="none"', ', reduction="sum"'))
    code = d.choice(("F.cross_entropy({0}, {1}%s)", "F.nll_loss(F.log_softmax({0}, 1), {1}%s)"))
    return d.statement(code % way, x, target)


def similarity(d: Draft) -> Statement | None:
    """Cosines of rows."""
    x = d.floating((2, 3))
    return None if x is None else d.statement("F.cosine_similarity({0}, {1}, -1)", x, d.alike(x))


def product(d: Draft) -> Statement | None:
    """A product with a new weight, and what often stands behind it."""
    x = d.floating((2, 3, 4))
    if x is None:
        return None
    k, n, dtype = d.shape(x)[-1], d.size(33), dtype_name(d.own[x].dtype)
    behind = d.choice(
        ("%s", "%s", "F.relu(%s)", "F.gelu(%s)", "torch.tanh(%s) + 1", "(%s).sum(-1)")
    )
    scaled = f"* {k**-0.5:.3f}"
    if d.rng.random() < 0.5:
        weight, bias = d.input((n, k), dtype), d.input((n,), dtype)
        code = d.choice(
            (f"F.linear({{0}}, {{1}} {scaled}, {{2}})", f"F.linear({{0}}, {{1}} {scaled})")
        )
        return d.statement(behind % code, x, weight, bias)
    weight = d.input((k, n), dtype)
    return d.statement(behind % f"({{0}} @ {{1}}) {scaled}", x, weight)


def product_of_values(d: Draft) -> Statement | None:
    """A product of values: of a value with itself turned, over batches, by einsum."""
    x = d.floating((2, 3, 4))
    if x is None:
        return None
    scaled = f"* {d.shape(x)[-1] ** -0.5:.3f}"
    y = d.alike(x)
    options = [
        f"({{0}} @ {{1}}.transpose(-1, -2)) {scaled}",
        f"({{0}}.transpose(-1, -2) @ {{1}}) * {d.shape(x)[-2] ** -0.5:.3f}",
        f"torch.einsum('...ik,...jk->...ij', {{0}}, {{1}}) {scaled}",
        f"({{0}} @ {{1}}.select(-2, 0).unsqueeze(-1)) {scaled}",
    ]
    return d.statement(d.choice(options), x, y)


def convolution(d: Draft) -> Statement | None:
    """A convolution over one or two axes, at times of groups, with strides or holes."""
    x = d.floating((3, 4))
    if x is None:
        return None
    shape, dtype = d.shape(x), dtype_name(d.own[x].dtype)
    channels, out = shape[1], d.size(9)
    taps = tuple(min(d.choice((1, 2, 3)), e) for e in shape[2:])
    scaled = f"* {(channels * taps[0]) ** -0.5:.3f}"
    name = f"F.conv{len(taps)}d"
    if d.rng.random() < 0.25:
        weight = d.input((channels, 1, *taps), dtype)
        return d.statement(f"{name}({{0}}, {{1}}, groups={channels}, padding=1)", x, weight)
    if d.rng.random() < 0.2:
        weight = d.input((channels, out, *taps), dtype)
        turned = name.replace("conv", "conv_transpose")
        return d.statement(f"{turned}({{0}}, {{1}} {scaled}, stride={d.choice((1, 2))})", x, weight)
    weight, bias = d.input((out, channels, *taps), dtype), d.input((out,), dtype)
    more = d.choice(("", ", padding=1", ", stride=2, padding=1", ", dilation=2, padding=2"))
    code = f"{name}({{0}}, {{1}} {scaled}, {{2}}{more})"
    return d.statement(d.choice((code, f"F.relu({code})")), x, weight, bias)


def pool(d: Draft) -> Statement | None:
    """Windows over the last one or two axes."""
    x = d.floating((3, 4))
    if x is None:
        return None
    rank = d.own[x].ndim - 2
    size = d.choice((2, 3))
    to = d.choice((1, 2, 3))
    options = [
        f"F.max_pool{rank}d({{0}}, {size})",
        f"F.max_pool{rank}d({{0}}, 3, stride=2, padding=1)",
        f"F.avg_pool{rank}d({{0}}, {size})",
        f"F.avg_pool{rank}d({{0}}, {size}, stride=1)",
        f"F.adaptive_avg_pool{rank}d({{0}}, {to})",
    ]
    if rank == 2:
        options += [
            "F.interpolate({0}, scale_factor=2)",
            # TVM interpolates float64 in float32
            'F.interpolate({0}.to(torch.float32), scale_factor=2, mode="bilinear")',
        ]
    return d.statement(d.choice(options), x)


def attention(d: Draft) -> Statement | None:
    """Attention of a few heads, by the operator or written out."""
    heads, keys, width = d.size(3), d.size(24), d.choice((4, 7, 8, 16, 17))
    near = d.floating((2, 3, 4))
    q = d.input((1, heads, d.size(17), width), d.dtype)
    k, v = (d.input((1, heads, keys, width), d.dtype) for _ in range(2))
    shift = "" if near is None else " + {3}.flatten()[0] * 0.1"
    scores = f"({{0}} @ {{1}}.transpose(-1, -2) * {width**-0.5:.3f})"
    code = d.choice(
        (
            "F.scaled_dot_product_attention({0}, {1}, {2})",
            "F.scaled_dot_product_attention({0}, {1}, {2}, is_causal=True)",
            f"torch.softmax({scores}, -1) @ {{2}}",
            f"torch.softmax({scores} + torch.tril({scores}), -1) @ {{2}}",
        )
    )
    return d.statement(code + shift, q, k, v, *(() if near is None else (near,)))


STEPS = (
    Step("softmax", 3, softmax),
    Step("norm", 3, norm),
    Step("norm_of_channels", 1.5, norm_of_channels),
    Step("loss", 1, loss),
    Step("classes", 1, classes),
    Step("similarity", 0.5, similarity),
    Step("product", 3, product),
    Step("product_of_values", 2, product_of_values),
    Step("convolution", 2, convolution),
    Step("pool", 1.5, pool),
    Step("attention", 0.5, attention),
)
