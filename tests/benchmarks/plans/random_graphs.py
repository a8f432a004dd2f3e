"""Graphs by key: random ones of a few operators in the shapes of real models, and workloads of the
benchmark suites.

==============================  ====================================================================
key                             module
==============================  ====================================================================
`random:<seed>[:<n>]`           `n` operators (4 to 8, drawn if not given), full size
`random-small:<seed>[:<n>]`     the same kind of graph on a few elements, for a CPU
`suite:<suite>/<workload>`      a workload; then `@<scale>` and `:<dtype>`, if not its own
==============================  ====================================================================

A key gives the same module everywhere, so that it stands for the module in files of measurements.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod

import tvm
from tvm import relax

from tvm_fusion.config import HardwareProfile, Policy
from tvm_fusion.errors import InputError
from tvm_fusion.ir.graph import FusionGraph, build_graph
from tvm_fusion.transform.pipeline import lower

from .random_steps import STEPS, Draft, Value

MIN_OPS, MAX_OPS = 4, 8
EXTRA_OUTPUT = 0.25  # how often a value that is read inside is a result, too

Shape = tuple[int, ...]

# Activations of transformers (also after the heads were split), convnets, and odd sizes: 8 to 128
# MB in half precision, and, drawn less often, what fits into the L2.
LARGE: tuple[Shape, ...] = (
    (4096, 4096),
    (8192, 4096),
    (8192, 8192),
    (16384, 1024),
    (4096, 5120),
    (2048, 11008),
    (4096, 11008),
    (1024, 32000),
    (32768, 768),
    (4095, 2049),
    (3001, 1777),
    (65536, 256),
    (131072, 64),
    (8, 1024, 768),
    (2, 2048, 4096),
    (4, 2048, 1024),
    (32, 197, 768),
    (8, 16, 1024, 64),
    (4, 12, 512, 512),
    (8, 512, 16, 64),
    (32, 64, 56, 56),
    (32, 256, 56, 56),
    (64, 512, 14, 14),
    (16, 64, 112, 112),
)
LITTLE: tuple[Shape, ...] = (
    (1024, 768),
    (512, 1024),
    (1023, 1025),
    (16, 8192),
    (8, 4096),
    (2, 512, 768),
    (2, 16, 1024, 64),
    (16, 256, 14, 14),
)
LITTLE_SHARE = 0.15
SMALL: tuple[Shape, ...] = (
    (16, 32),
    (12, 20),
    (7, 13),
    (1, 24),
    (40, 8),
    (2, 6, 16),
    (3, 5, 8),
    (2, 3, 4, 6),
    (2, 8, 4, 4),
)
DTYPES = ("float16",) * 7 + ("bfloat16", "float32", "float32")
MAX_BYTES = {"full": 128 << 20, "small": 1 << 14}


def module_of(key: str) -> tvm.IRModule:
    """The module that a key stands for.

    Raises
    ------
    InputError
        The key is of no known kind.
    """
    kind, _, rest = key.partition(":")
    if kind in ("random", "random-small"):
        return _random_module(kind == "random-small", rest, key)
    if kind == "suite":
        from .suite_graphs import suite_module

        return suite_module(rest)
    raise InputError(
        f"{key!r} is no key of a graph: random:<seed>[:<operators>], random-small:<seed>"
        "[:<operators>] or suite:<suite>/<workload>[@<scale>][:<dtype>]"
    )


def graph_of(
    key: str, hw: HardwareProfile, policy: Policy | None = None, rewrites: tuple[str, ...] = ()
) -> tuple[tvm.IRModule, FusionGraph]:
    """The lowered module of a key for a device, and its graph.

    Parameters
    ----------
    key : str
        See `module_of`.
    hw : HardwareProfile
    policy : Policy or None
        Has no influence so far.
    rewrites : tuple of str
        Names of `transform.rewrites.rewrites.REWRITES` to apply.
    """
    low = lower(module_of(key), hw.to_target(), hw=hw, rewrites=rewrites)
    return low, build_graph(low)


def keys_of(text: str) -> list[str]:
    """The keys of a list: `random:0-59,random-small:3,suite:memory,suite:small/three_softmaxes`.

    A range of seeds stands for each of them, a suite for all of its workloads; `:<dtype>` behind
    a suite goes to each.

    Raises
    ------
    InputError
        A range or a suite is unknown.
    """
    found: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        kind, _, rest = item.partition(":")
        if kind == "suite" and "/" not in rest:
            from .suite_graphs import suite_keys

            found += suite_keys(rest)
            continue
        first, dash, last = rest.partition("-")
        if not dash:
            found.append(item)
            continue
        last, _, count = last.partition(":")
        if kind not in ("random", "random-small") or not (first.isdigit() and last.isdigit()):
            raise InputError(f"{item!r} is no range of graphs: write random:<first>-<last>")
        tail = f":{count}" if count else ""
        found += [f"{kind}:{seed}{tail}" for seed in range(int(first), int(last) + 1)]
    return list(dict.fromkeys(found))


def _random_module(small: bool, rest: str, key: str) -> tvm.IRModule:
    seed, _, count = rest.partition(":")
    if not seed.isdigit() or (count and not count.isdigit()):
        raise InputError(f"{key!r}: seed and number of operators have to be whole numbers")
    rng = random.Random(f"{'small' if small else 'full'} {seed} {count}")
    ops = int(count) if count else rng.randint(MIN_OPS, MAX_OPS)
    return _Writer(rng, ops, small).module()


@dataclass
class _Writer:
    """Draws one module.

    Steps are taken until the number of operators is reached. Values are mostly continued where
    the last step ended; now and then an earlier one is read again.
    """

    rng: random.Random
    ops: int
    small: bool

    def module(self) -> tvm.IRModule:
        limit = MAX_BYTES["small" if self.small else "full"]
        dtype = self.rng.choice(DTYPES)
        width = 4 if dtype == "float32" else 2
        shapes = LITTLE if self.rng.random() < LITTLE_SHARE else LARGE
        shapes = SMALL if self.small else shapes
        shape = self.rng.choice([s for s in shapes if prod(s) * width <= limit])
        builder = relax.BlockBuilder()
        draft = Draft(builder, self.rng, self.ops, limit)
        with builder.function("main"):
            with builder.dataflow():
                results = [v.expr for v in self._body(draft, shape, dtype)]
                whole = results[0] if len(results) == 1 else relax.Tuple(results)
                out = builder.emit_output(whole)
            builder.emit_func_output(out, draft.params)
        return builder.get()

    def _body(self, draft: Draft, shape: Shape, dtype: str) -> list[Value]:
        rng = self.rng
        draft.parameter(shape, dtype)
        while draft.left > 0:
            possible = [step for step in STEPS if step.least <= draft.left]
            step = rng.choices(possible, [s.weight for s in possible])[0]
            step.take(draft, draft.pick())
        results = [v for v in draft.values if not v.uses and v.made]
        inner = [v for v in draft.values if v.uses and v.made and prod(v.shape) > 1]
        if inner and rng.random() < EXTRA_OUTPUT:
            results.append(rng.choice(inner))
        return results
