"""Statements that move values: views, joins, pads, gathers."""

from __future__ import annotations

from .draw import Draft, Step
from .torch_program import Statement


def turn(d: Draft) -> Statement | None:
    """Axes in another order."""
    x = d.value(lambda v: v.ndim >= 2)
    if x is None:
        return None
    rank = d.own[x].ndim
    order = d.rng.sample(range(rank), rank)
    a, b = d.rng.sample(range(rank), 2)
    return d.statement(
        d.choice(
            (
                f"{{0}}.permute({tuple(order)})",
                f"{{0}}.transpose({a}, {b})",
                f"{{0}}.transpose({a}, {b}).contiguous()",
                f"torch.rot90({{0}}, {d.choice((1, 2, 3))}, ({a}, {b}))",
            )
        ),
        x,
    )


def part(d: Draft) -> Statement | None:
    """A slice, with steps at times, or one index of an axis."""
    x = d.value(lambda v: v.ndim >= 1)
    if x is None:
        return None
    axis = d.axis(x)
    extent = d.shape(x)[axis]
    start = d.rng.randrange(extent)
    stop = d.rng.randint(start + 1, extent)
    before = ":, " * axis
    return d.statement(
        d.choice(
            (
                f"{{0}}[{before}{start}:{stop}]",
                f"{{0}}[{before}{start}:{stop}:{d.choice((2, 3))}]",
                f"{{0}}[{before}{start - extent}:]",
                f"{{0}}.narrow({axis}, {start}, {stop - start})",
                f"{{0}}.select({axis}, {start})",
                f"{{0}}[{before}{start}]",
            )
        ),
        x,
    )


def reshape(d: Draft) -> Statement | None:
    """The same elements under other axes."""
    x = d.value(lambda v: v.ndim >= 1)
    if x is None:
        return None
    shape = d.shape(x)
    axis = d.axis(x)
    divisors = [f for f in range(2, shape[axis]) if shape[axis] % f == 0]
    options = ["{0}.flatten()", f"{{0}}.unsqueeze({axis})", "{0}.squeeze()"]
    if len(shape) > 1:
        first = d.rng.randrange(len(shape) - 1)
        options += [f"{{0}}.flatten({first}, {first + 1})"] * 2
    if divisors:
        outer = d.choice(divisors)
        split = (*shape[:axis], outer, shape[axis] // outer, *shape[axis + 1 :])
        options += [f"{{0}}.reshape({split})"] * 3
    return d.statement(d.choice(options), x)


def spread(d: Draft) -> Statement | None:
    """Elements repeated, flipped, rolled."""
    x = d.value(lambda v: v.ndim >= 1)
    if x is None:
        return None
    axis, rank = d.axis(x), d.own[x].ndim
    more = d.choice((2, 3, 5))
    times = ", ".join(map(str, (d.choice((1, 2)) for _ in range(rank))))
    kept = ", ".join("-1" for _ in range(rank))
    return d.statement(
        d.choice(
            (
                f"{{0}}.flip({axis})",
                f"{{0}}.unsqueeze(0).expand({more}, {kept})",
                f"{{0}}.repeat({times})",
                f"torch.repeat_interleave({{0}}, {more}, {axis})",
                f"torch.roll({{0}}, {more}, {axis})",
            )
        ),
        x,
    )


def join(d: Draft) -> Statement | None:
    """Values side by side."""
    x = d.value(lambda v: v.ndim >= 1)
    if x is None:
        return None
    y, axis = d.alike(x), d.axis(x)
    return d.statement(
        d.choice(
            (
                f"torch.cat([{{0}}, {{1}}], {axis})",
                f"torch.cat([{{0}}, {{1}}, {{0}}], {axis})",
                f"torch.stack([{{0}}, {{1}}], {axis})",
                f"torch.cat([t * 2 for t in {{0}}.split({d.size(16)}, {axis})], {axis})",
                f"torch.cat(torch.chunk({{0}}, 3, {axis})[::-1], {axis})",
                f"torch.stack({{0}}.unbind({axis})[:3], {axis})",
            )
        ),
        x,
        y,
    )


def pad(d: Draft) -> Statement | None:
    """A border around a value."""
    x = d.floating((1, 2, 3, 4))
    if x is None:
        return None
    left, right = d.choice((0, 1, 2, 3)), d.choice((0, 1, 4))
    if d.own[x].ndim in (2, 3) and d.rng.random() < 0.4:
        mode = d.choice(("reflect", "replicate", "circular"))
        return d.statement(f'F.pad({{0}}, ({left}, {right}), mode="{mode}")', x)
    more = d.choice(("", ", 1, 2")) if d.own[x].ndim > 1 else ""
    return d.statement(f"F.pad({{0}}, ({left}, {right}{more}), value={d.choice((0.0, -1.5))})", x)


def triangle(d: Draft) -> Statement | None:
    """A triangle, or a diagonal, of matrices."""
    x = d.floating((2, 3, 4))
    at = d.choice((-1, 0, 2))
    code = d.choice(
        ("torch.tril({0}, %d)", "torch.triu({0}, %d)", "torch.diagonal({0}, %d, -2, -1)")
    )
    return d.statement(code % at, x)


def take(d: Draft) -> Statement | None:
    """Rows picked by indices that are inputs."""
    x = d.value(lambda v: v.ndim >= 1)
    if x is None:
        return None
    axis = d.axis(x)
    extent = d.shape(x)[axis]
    rows = d.input((d.size(17),), "int64", below=extent)
    code = d.choice((f"{{0}}.index_select({axis}, {{1}})", f"{{0}}[{':, ' * axis}{{1}}]"))
    if d.own[x].ndim == 2 and d.own[x].is_floating_point() and d.rng.random() < 0.4:
        rows = d.input((d.size(5), d.size(9)), "int64", below=d.shape(x)[0])
        code = "F.embedding({1}, {0})"
    return d.statement(code, x, rows)


def gather(d: Draft) -> Statement | None:
    """Elements picked along an axis, or put back along it."""
    x = d.floating((1, 2, 3))
    if x is None:
        return None
    axis = d.axis(x)
    shape = list(d.shape(x))
    extent, shape[axis] = shape[axis], d.size(12)
    indices = d.input(tuple(shape), "int64", below=extent)
    if d.rng.random() < 0.6:
        code = d.choice(
            (f"torch.gather({{0}}, {axis}, {{1}})", f"{{0}}.take_along_dim({{1}}, {axis})")
        )
        return d.statement(code, x, indices)
    whole = d.alike(x)
    order = [-1 if a == axis else 1 for a in range(len(shape))]
    at = f"torch.arange({extent}).flip(0).reshape({order}).expand({d.shape(x)})"
    code = d.choice(("torch.scatter({0}, %d, %s, {1})", "torch.scatter({0}, %d, %s, 1.5)"))
    return d.statement(code % (axis, at), x, whole)


def top(d: Draft) -> Statement | None:
    """The largest elements, or where they are."""
    x = d.floating((1, 2, 3))
    if x is None:
        return None
    axis = d.axis(x)
    count = d.rng.randint(1, min(6, d.shape(x)[axis]))
    found = f"torch.topk({{0}}, {count}, {axis})"
    values = f"torch.gather({{0}}, {axis}, {found}[1])"  # equal ones come in any order
    return d.statement(d.choice((f"{found}[0]", values)), x)


STEPS = (
    Step("turn", 4, turn),
    Step("part", 4, part),
    Step("reshape", 3, reshape),
    Step("spread", 3, spread),
    Step("join", 2.5, join),
    Step("pad", 1.5, pad),
    Step("triangle", 1, triangle),
    Step("take", 1.5, take),
    Step("gather", 1, gather),
    Step("top", 0.7, top),
)
