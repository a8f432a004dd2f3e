"""Statements that write into tensors: into copies, into views of them, into earlier values."""

from __future__ import annotations

from .draw import Draft, Step, dtype_name
from .torch_program import Statement

UPDATES = (
    "{at} += 1",
    "{at} *= 0.5",
    "{at} = {source}",
    "{at}.copy_({source})",
    "{at}.fill_(2)",
    "{at} = {source} * 2 - 1",
    "{at}.neg_()",
)


def _region(d: Draft, name: str) -> str:
    """An index of a part of a value."""
    axis = d.axis(name)
    extent = d.shape(name)[axis]
    start = d.rng.randrange(extent)
    stop = d.rng.randint(start + 1, extent)
    step = d.choice(("", "", ":2"))
    return f"[{':, ' * axis}{start}:{stop}{step}]"


def update_of_copy(d: Draft) -> Statement | None:
    """A part of a copy, or of a turned view of it, is changed."""
    x = d.value(lambda v: v.ndim >= 1)
    if x is None:
        return None
    view = d.choice(("", "", ".unsqueeze(0)[0]", *([".t()"] if d.own[x].ndim == 2 else [])))
    region = _region(d, x) if view != ".t()" else f"[{d.rng.randrange(d.shape(x)[1])}:]"
    update = d.choice(UPDATES).format(at="u" + region, source=f"{{0}}{view}{region}")
    return d.statement(f"{{out}} = {{0}}.clone()\nu = {{out}}{view}\n{update}", x)


def update_in_place(d: Draft) -> Statement | None:
    """A part of an earlier value is changed, for all that read it or a view of it later. What is
    copied from memory that is written meanwhile is undefined in torch: it is cloned before.
    """
    x = d.value(lambda v: v.ndim >= 1)
    if x is None or not d.owned(x):
        return None
    source = d.alike(x)
    region = _region(d, x)
    read = "{1}" + region + (".clone()" if x != source and d.share(x, source) else "")
    update = d.choice(UPDATES).format(at="{0}" + region, source=read)
    return d.statement(update + "\n{out} = {0}", x, source)


def put(d: Draft) -> Statement | None:
    """Rows are put where indices say, each at most once."""
    x = d.floating((1, 2, 3))
    if x is None:
        return None
    extent = d.shape(x)[0]
    rows = d.rng.sample(range(extent), d.rng.randint(1, min(4, extent)))
    source = d.input((len(rows), *d.shape(x)[1:]), dtype_name(d.own[x].dtype))
    code = d.choice(
        (
            f"{{out}} = {{0}}.clone()\n{{out}}[torch.tensor({rows})] = {{1}}",
            f"torch.index_put({{0}}, (torch.tensor({rows}),), {{1}})",
            f"torch.index_copy({{0}}, 0, torch.tensor({rows}), {{1}})",
        )
    )
    return d.statement(code, x, source)


def scatter_part(d: Draft) -> Statement | None:
    """A slice, or one index of an axis, of a new tensor is another."""
    x = d.value(lambda v: v.ndim >= 1)
    if x is None:
        return None
    axis = d.axis(x)
    extent = d.shape(x)[axis]
    at = d.rng.randrange(extent)
    return d.statement(
        d.choice(
            (
                f"torch.select_scatter({{0}}, {{0}}.select({axis}, 0), {axis}, {at})",
                f"torch.slice_scatter({{0}}, {{0}}.narrow({axis}, 0, {extent - at}), {axis}, {at})",
            )
        ),
        x,
    )


STEPS = (
    Step("update_of_copy", 2.5, update_of_copy),
    Step("update_in_place", 2, update_in_place),
    Step("put", 1, put),
    Step("scatter_part", 1, scatter_part),
)
