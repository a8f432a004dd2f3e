"""Bugs planted in written kernels: what the check of `compile` has to keep from its callers.

A mutation changes one place of the TIR of each kernel that a class writes, and stays within all
buffers: what it breaks are numbers, not processes.

    python -m tests.planted --out tests/results/planted_llvm.json      all of them, on the CPU
    python -m tests.planted --target cuda --out ...                    on a GPU

`--lines FILE` keeps a line a bug; what is in the file already is not tried again. On a GPU a bug
that reads at a wrong address ends the process: run it again until it succeeds,

    until python -m tests.planted --target cuda --part 3/20 --lines FILE; do :; done

and such a bug is compiled with the check only, then left alone. `--gather FILE...` makes the
result.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

import tvm_fusion
from tvm_fusion.errors import OutOfRange, VerificationError
from tvm_fusion.kernels import registry
from tvm_fusion.kernels.program.expr import dtype_of
from tvm_fusion.plan.plan import UNWRITTEN

from .right_programs import FunctionModule

Site = Callable[[object], object | None]  # what stands in a node's place; None: no such node
Key = tuple[str, str, int]  # a program, a mutation, a seed


def _store(node: tirx.BufferStore) -> object | None:
    """A result or a partial one that is never written."""
    return tirx.Evaluate(tirx.IntImm("int32", 0))


def _loop(node: tirx.For) -> object | None:
    """A loop, of terms or of elements, that ends one step early."""
    extent = node.extent
    if node.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL):
        return None
    if not isinstance(extent, tirx.IntImm) or int(extent) < 2:
        return None
    return _shortened(node, node.min)


def _late_loop(node: tirx.For) -> object | None:
    """A loop that leaves its first step out."""
    return None if _loop(node) is None else _shortened(node, node.min + _one(node.min))


def _shortened(node: tirx.For, first: object) -> object:
    extent = tirx.IntImm(dtype_of(node.extent), int(node.extent) - 1)
    return tirx.For(node.loop_var, first, extent, node.kind, node.body, None, node.annotations)


def _one(like: object) -> tirx.IntImm:
    return tirx.IntImm(dtype_of(like), 1)


def _bound(node: object) -> object | None:
    """A bound that leaves the last element out."""
    return type(node)(node.a + _one(node.a), node.b) if _is_index(node) else None


def _is_index(node: object) -> bool:
    return dtype_of(node.a) in ("int32", "int64")


def _index(node: TensorLoad) -> object | None:
    """An index map that reads a neighbour."""
    extents, at = list(node.source.ty.shape), list(node.indices)
    if not at or len(at) != len(extents) or "x" in dtype_of(at[-1]):
        return None
    if not isinstance(extents[-1], tirx.IntImm) or int(extents[-1]) < 2:
        return None
    at[-1] = tirx.FloorMod(at[-1] + _one(at[-1]), tirx.Cast(dtype_of(at[-1]), extents[-1]))
    return tirx.BufferLoad(node.source, at)


def _layout(node: TensorLoad) -> object | None:
    """A layout with two axes of one length taken for each other."""
    extents, at = list(node.source.ty.shape), list(node.indices)
    if len(at) < 2 or not isinstance(extents[-1], tirx.IntImm) or "x" in dtype_of(at[-1]):
        return None
    if not isinstance(extents[-2], tirx.IntImm) or int(extents[-1]) != int(extents[-2]):
        return None
    return tirx.BufferLoad(node.source, [*at[:-2], at[-1], at[-2]])


def _mask(node: tirx.Select) -> object | None:
    """A mask that hides nothing."""
    return node.true_value


def _identity(node: tirx.BufferStore) -> object | None:
    """A running result that starts from another number than the neutral one."""
    value = node.value
    if isinstance(value, tirx.Broadcast):
        inner = _other(value.value)
        changed = None if inner is None else tirx.Broadcast(inner, value.lanes)
    else:
        changed = _other(value)
    if changed is None:
        return None
    return tirx.BufferStore(node.buffer, changed, node.indices, *_predicate(node))


def _other(value: object) -> object | None:
    if isinstance(value, tirx.FloatImm):
        return tirx.FloatImm(dtype_of(value), 1.0 if abs(value.value) < 1e4 else 0.0)
    if isinstance(value, tirx.IntImm) and dtype_of(value) != "bool":
        return tirx.IntImm(dtype_of(value), 1 if int(value) == 0 else 0)
    return None


def _predicate(node: tirx.BufferStore) -> tuple:
    found = getattr(node, "predicate", None)
    return () if found is None else (found,)


def _barrier(node: tirx.Evaluate) -> object | None:
    """A barrier left out: shared memory is read before it is written, or is stale."""
    call = node.value
    if not isinstance(call, Call) or not str(call.op.name).endswith(("storage_sync", "cta_sync")):
        return None
    return tirx.Evaluate(tirx.IntImm("int32", 0))


def _maximum(node: tirx.Max) -> object | None:
    """A maximum of the first two for one of all."""
    return node.a


def _rounded(node: tirx.Add) -> object | None:
    """A sum that is rounded to half precision on its way."""
    if dtype_of(node) != "float32":
        return None
    return tirx.Cast("float32", tirx.Cast("float16", node))


MUTATIONS: dict[str, tuple[type | tuple, Site]] = {
    "dropped store": (tirx.BufferStore, _store),
    "stale buffer": (tirx.BufferStore, _store),  # of the kernel's own memory
    "short loop": (tirx.For, _loop),
    "late loop": (tirx.For, _late_loop),
    "bound": (tirx.LT, _bound),
    "index map": (TensorLoad, _index),
    "layout": (TensorLoad, _layout),
    "mask": (tirx.Select, _mask),
    "identity": (tirx.BufferStore, _identity),
    "barrier": (tirx.Evaluate, _barrier),
    "maximum": (tirx.Max, _maximum),
    "narrow sum": (tirx.Add, _rounded),
}


def mutated(func: tirx.PrimFunc, mutation: str, seed: int) -> tirx.PrimFunc:
    """The function with one place changed, picked by the seed; the same where there is none."""
    kind, anywhere = MUTATIONS[mutation]
    params = {hash(p) for p in func.params}

    def site(node: object) -> object | None:
        if mutation == "stale buffer" and hash(node.buffer) in params:
            return None
        return anywhere(node)

    places: list[object] = []
    tvm_ffi.structural_walk(
        func.body, [(kind, lambda n: places.append(n) if site(n) is not None else None)]
    )
    if not places:
        return func
    chosen = random.Random(seed).randrange(len(places))
    count = -1

    def change(node: object) -> object:
        nonlocal count
        changed = site(node)
        if changed is None:
            return node
        count += 1
        return changed if count == chosen else node

    return func.with_body(tvm_ffi.structural_map(func.body, [(kind, change)]))


class Planted:
    """A kernel class whose kernels have a bug."""

    def __init__(self, like: object, mutation: str, seed: int) -> None:
        self.like, self.mutation, self.seed, self.name = like, mutation, seed, like.name

    def __getattr__(self, name: str) -> object:
        return getattr(self.like, name)

    def write(self, func, hw, policy, config=None):
        kernel = self.like.write(func, hw, policy, config)
        return mutated(kernel, self.mutation, self.seed)


@contextlib.contextmanager
def planted(mutation: str, seed: int) -> Iterator[None]:
    """All kernel classes with a bug."""
    before = dict(registry._FAMILIES)
    try:
        for name, (cls, kinds) in before.items():
            registry._FAMILIES[name] = (Planted(cls, mutation, seed), kinds)
        yield
    finally:
        registry._FAMILIES.clear()
        registry._FAMILIES.update(before)


# ---- programs, one a kernel class and more -------------------------------------------------------


WEIGHT = torch.randn((45, 61), generator=torch.Generator().manual_seed(0))


def _attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _half_norm(x):
    return F.layer_norm(x.half(), (130,))


PROGRAMS: dict[str, tuple[Callable, tuple]] = {
    # pointwise
    "chain": (lambda x: torch.tanh(x * 2 + 1) * x, ((33, 129),)),
    "integers": (lambda x, y: torch.maximum(x * 3 - y, y), (("int", 33, 19), ("int", 33, 19))),
    "transpose": (lambda x, y: x.t() + y, ((65, 65), (65, 65))),
    "permute": (lambda x: x.permute(2, 0, 1).contiguous() * 2, ((17, 33, 19),)),
    "concat": (lambda x, y: torch.cat([x, y], 1) * 2, ((9, 17), (9, 30))),
    "pad": (lambda x: F.pad(x, (2, 3), value=1.0) * 2, ((19, 33),)),
    "gather": (lambda x, i: x[i.abs()] * 2, ((37, 19), ("int", 23))),
    # row
    "sum": (lambda x: (x * 2 + 1).sum(-1) * 3, ((33, 1037),)),
    "integer sum": (lambda x: (x * 2 + 1).sum(-1) * 3, (("int", 33, 1037),)),
    "softmax": (lambda x: torch.softmax(x * 0.5, -1), ((19, 517),)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (129,), w, b), ((37, 129), (129,), (129,))),
    "half norm": (_half_norm, ((21, 130),)),
    "group norm": (lambda x: F.group_norm(x, 3), ((2, 9, 13, 11),)),
    "largest": (lambda x: (x * 2).argmax(-1), ((21, 333),)),
    "masked": (lambda x: torch.where(x > 0, x, x * 0.1).sum(-1), ((21, 130),)),
    "maximum": (lambda x: (x + 1).amax(-1), ((21, 130),)),
    "any": (lambda x: (x > 2).any(-1), ((37, 29),)),
    "loss": (lambda x: -torch.log_softmax(x, -1)[:, 3].mean(), ((41, 203),)),
    "mean of all": (lambda x: (x * x).mean(), ((137, 219),)),
    "pooling": (lambda x: F.max_pool2d(x, 3, 2, 1), ((2, 5, 13, 11),)),
    # column
    "column sum": (lambda x: (x * x).sum(0), ((67, 45),)),
    "logarithm of a sum": (lambda x: torch.logsumexp(x, 0), ((67, 45),)),
    "middle sum": (lambda x: torch.exp(x).sum(1), ((5, 37, 19),)),
    "variance": (lambda x: x.var(0), ((67, 45),)),
    # nest
    "convolution": (lambda x, k: F.conv2d(x, k, padding=1) * 2, ((2, 5, 13, 11), (7, 5, 3, 3))),
    "transposed": (lambda x, k: F.conv_transpose2d(x, k, stride=2), ((2, 5, 7, 6), (5, 4, 3, 3))),
    "smallest": (lambda x: x.argmin(0), ((37, 29),)),
    # gemm
    "product": (lambda x, w: F.gelu(x @ w), ((37, 61), (61, 45))),
    "square product": (lambda x, w, r: torch.relu(x @ w) + r, ((32, 32), (32, 32), (32, 32))),
    "linear": (lambda x: F.relu(F.linear(x, WEIGHT.to(x.dtype))), ((37, 61),)),
    "one row": (lambda x, w: x @ w, ((1, 261), (261, 45))),
    "products": (lambda x, w: torch.tanh(x @ w), ((3, 19, 37), (3, 37, 23))),
    "integer product": (lambda x, w: x @ w, (("int", 19, 37), ("int", 37, 23))),
    # attention
    "attention": (_attention, ((1, 2, 37, 16),) * 3),
    "attention to all": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        ((2, 3, 19, 24), (2, 3, 45, 24), (2, 3, 45, 24)),
    ),
}
NEAR = {torch.float32: 1e-4, torch.float16: 4e-3}


def inputs_of(program: str, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in PROGRAMS[program][1]:
        if shape[0] == "int":
            made.append(torch.randint(-9, 9, shape[1:], generator=generator, dtype=torch.int32))
        else:
            made.append(torch.randn(shape, generator=generator))
    return tuple(made)


@dataclass(frozen=True)
class Outcome:
    """What became of one planted bug.

    Attributes
    ----------
    classes : tuple of str
        The kernel classes of the program, each of which has the bug in its kernels.
    effective : bool
        Whether the module is wrong without the check.
    verdict : str
        "right": a module with right numbers; "refused": no module; "wrong"; "ended": the check
        ended the process, which returned no module.
    """

    program: str
    mutation: str
    seed: int
    classes: tuple[str, ...]
    effective: bool
    verdict: str


def tried(
    program: str, mutation: str, seed: int, target: str = "llvm", ended: bool = False
) -> Outcome:
    """Compile a program with a planted bug, without the check and with it; where it `ended` a
    process before, it is not run without the check.
    """
    model = FunctionModule(PROGRAMS[program][0]), inputs_of(program, 0)
    with planted(mutation, seed):
        unchecked = tvm_fusion.compile(model, target, verify=False)
        classes = tuple(sorted({g.kernel_class for g in unchecked.plan.groups} - set(UNWRITTEN)))
        key = (program, mutation, seed, classes)
        if not ended and _is_right(unchecked, program, target):
            return Outcome(*key, False, "right")
        try:
            checked = tvm_fusion.compile(model, target, verify=True)
        except VerificationError:
            return Outcome(*key, True, "refused")
    return Outcome(*key, True, "right" if _is_right(checked, program, target) else "wrong")


def _is_right(compiled: object, program: str, target: str) -> bool:
    """Whether a module is right on two inputs that the check did not see."""
    device = "cpu" if target.startswith("llvm") else "cuda"
    for seed in (1, 2):
        inputs = inputs_of(program, seed)
        exact = PROGRAMS[program][0](*(x.double() if x.is_floating_point() else x for x in inputs))
        try:
            given = compiled(*(x.to(device) for x in inputs)).cpu()
        except OutOfRange:
            return False
        error = (given.double() - exact.double()).abs().max()
        near = NEAR.get(given.dtype, 0.0)
        if not error <= near * max(1.0, float(exact.double().abs().max())):
            return False
    return True


def every(seeds: int) -> Iterator[Key]:
    return ((p, m, s) for p in PROGRAMS for m in MUTATIONS for s in range(seeds))


# ---- the command ---------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome], command: str) -> dict:
    """The result that is committed: counts, by mutation and by kernel class, and all that count."""
    effective = [o for o in outcomes if o.effective]
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "versions": {
            "tvm_fusion": tvm_fusion.__version__,
            "tvm": tvm.__version__,
            "torch": torch.__version__,
        },
        "planted": len(outcomes),
        "effective": len(effective),
        "with_the_check": {
            verdict: sum(o.verdict == verdict for o in effective)
            for verdict in ("right", "refused", "wrong", "ended")
        },
        "effective_by_mutation": {m: sum(o.mutation == m for o in effective) for m in MUTATIONS},
        "effective_by_class": Counter(c for o in effective for c in o.classes),
        "outcomes": [asdict(o) for o in effective],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--part", default="0/1", help="which of how many parts of the bugs: 3/20")
    parser.add_argument("--lines", type=Path, help="a file for lines of each bug")
    parser.add_argument("--gather", type=Path, nargs="+", help="such files, to be made the result")
    parser.add_argument("--out", type=Path, help="a file for the result")
    args = parser.parse_args()
    command = f"python -m tests.planted --target {args.target} --seeds {args.seeds}"
    if args.gather:
        outcomes = [o for file in args.gather for o in _read(file)[0]]
    else:
        part, parts = map(int, args.part.split("/"))
        outcomes = _run(list(every(args.seeds))[part::parts], args.target, args.lines)
    text = json.dumps(summary(outcomes, command), indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


def _run(keys: Sequence[Key], target: str, lines: Path | None) -> list[Outcome]:
    """The outcomes of bugs; those that are in the file of lines are not tried again."""
    outcomes, begun = _read(lines) if lines is not None and lines.exists() else ([], Counter())
    found = {(o.program, o.mutation, o.seed): o for o in outcomes}
    for key in keys:
        if key in found:
            continue
        if begun[key] < 2:
            _write(lines, {"begun": key})
            found[key] = tried(*key, target, ended=begun[key] > 0)
        else:
            found[key] = Outcome(*key, (), True, "ended")
        _write(lines, asdict(found[key]))
    return list(found.values())


def _write(lines: Path | None, line: dict) -> None:
    if lines is not None:
        with lines.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _read(file: Path) -> tuple[list[Outcome], Counter[Key]]:
    """The outcomes in a file of lines, and how often each bug was begun."""
    outcomes, begun = [], Counter()
    for values in map(json.loads, file.read_text().splitlines()):
        if "begun" in values:
            begun[tuple(values["begun"])] += 1
        else:
            outcomes.append(Outcome(**values | {"classes": tuple(values["classes"])}))
    return outcomes, begun


if __name__ == "__main__":
    main()
