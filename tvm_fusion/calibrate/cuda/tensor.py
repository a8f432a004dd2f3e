"""Rates of the tensor cores: our own matrix products of 4096^3, by type and tile.

The best tile of a type is its rate. What the types of the profile's table are measured by:

    float16, bfloat16            products of that type
    float8_e4m3fn, float8_e5m2   products of that type, float16 out
    tfloat32                     products of float32 that are allowed to round
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import te, tirx

from ...config import HardwareProfile, load_policy
from ...errors import Unsupported
from ...kernels.contraction.reader import analyze_contraction
from ...kernels.gemm.forms import WRITER
from ...kernels.gemm.hopper.plan import HopperConfig
from ...kernels.gemm.mma.plan import MmaConfig
from ..findings import Family, Finding, Measured
from .bench import CudaBench

SIZE = 4096
TILES = {"float16": 3, "bfloat16": 2, "float8_e4m3fn": 2, "float8_e5m2": 1, "tfloat32": 2}
"""Tiles that are tried, by type; each takes seconds of ptxas."""

Products = Mapping[str, tuple[str, str, tirx.PrimFunc]]
"""Type, tile and kernel by the kernel's name."""


def kernels(hw: HardwareProfile) -> dict:
    """The products whose tiles are predicted to be the fastest."""
    return {name: func for name, (_, _, func) in products(hw).items()}


def products(
    hw: HardwareProfile, tiles_of: Mapping[str, int] = TILES
) -> dict[str, tuple[str, str, tirx.PrimFunc]]:
    """Type, tile and kernel by the kernel's name; so many tiles of each type."""
    policy = load_policy({"allow_tf32": True})
    found = {}
    for dtype, wanted in tiles_of.items():
        if dtype not in hw.tensor_flop_per_s:
            continue
        contraction = analyze_contraction(_product("float32" if dtype == "tfloat32" else dtype))
        tiles: set[str] = set()
        for _, config in WRITER.ranked(contraction, hw, policy):
            if len(tiles) == wanted:
                break
            if not isinstance(config, HopperConfig | MmaConfig):
                continue
            tile = f"{config.block_m}x{config.block_n}"
            if tile in tiles:
                continue
            try:
                func = WRITER.emit(contraction, hw, policy, config)
            except Unsupported:
                continue
            tiles.add(tile)
            name = f"mb_product_{dtype}_{tile}"
            found[name] = dtype, tile, func.with_attr("global_symbol", name)
    return found


def quick_product(hw: HardwareProfile, dtype: str, most: int) -> tuple[Products, float]:
    """The fastest product of a type among tiles of at most `most` results, since large ones take
    seconds to compile; and the share of the best tile's rate that it is predicted to reach.
    """
    policy = load_policy()
    contraction = analyze_contraction(_product(dtype))
    best = 0.0
    for seconds, config in WRITER.ranked(contraction, hw, policy):
        if not isinstance(config, HopperConfig | MmaConfig):
            continue
        best = best or seconds
        if config.block_m * config.block_n > most:
            continue
        try:
            func = WRITER.emit(contraction, hw, policy, config)
        except Unsupported:
            continue
        tile = f"{config.block_m}x{config.block_n}"
        name = f"mb_product_{dtype}_{tile}"
        made = {name: (dtype, tile, func.with_attr("global_symbol", name))}
        return made, best / seconds
    return {}, 1.0


def _product(dtype: str) -> tirx.PrimFunc:
    """``a b^T`` with float32 sums; float8 gives float16."""
    a, b = (te.placeholder((SIZE, SIZE), dtype, name=name) for name in "ab")
    k = te.reduce_axis((0, SIZE), name="k")

    def term(i: Any, j: Any) -> Any:
        return te.sum(a[i, k].astype("float32") * b[j, k].astype("float32"), axis=k)

    c = te.compute((SIZE, SIZE), term, name="c")
    out = _result(dtype)
    if out == "float32":
        return te.create_prim_func([a, b, c])
    d = te.compute((SIZE, SIZE), lambda i, j: c[i, j].astype(out), name="d")
    return te.create_prim_func([a, b, d])


def _result(dtype: str) -> str:
    return "float16" if dtype.startswith("float8") else dtype


def rates(bench: CudaBench, made: Products) -> dict[str, dict[str, float]]:
    """Flop a second by type and tile, of those products that compile."""
    calls: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, (dtype, _, _) in made.items():
        if name in bench.failures:
            continue
        data = "float32" if dtype == "tfloat32" else dtype
        if data not in tensors:
            tensors[data] = tuple(_random(data, seed, bench.device) for seed in (1, 2))
        out = tvm.runtime.empty((SIZE, SIZE), _result(data), bench.device)
        calls[name] = name, (*tensors[data], out)
    found: dict[str, dict[str, float]] = {}
    for name, taken in bench.kernel_seconds(calls).items():
        dtype, tile, _ = made[name]
        found.setdefault(dtype, {})[tile] = 2 * SIZE**3 / taken
    return found


def measure(bench: CudaBench) -> Finding:
    """Flop a second of each type, the best tile's."""
    made = products(bench.hw)
    missing = [
        f"{dtype} {tile}: {bench.failures[name]}"
        for name, (dtype, tile, _) in made.items()
        if name in bench.failures
    ]
    found = rates(bench, made)
    notes = [
        f"{dtype} products of {SIZE}^3 by tile, Tflop/s: "
        + ", ".join(f"{tile} {rate / 1e12:.4g}" for tile, rate in tiles.items())
        for dtype, tiles in found.items()
    ]
    best = {dtype: max(tiles.values()) for dtype, tiles in found.items()}
    how = f"our own products of {SIZE}^3, the best tile of each type ({', '.join(best)})"
    return Finding([Measured("tensor_flop_per_s", best, how)] if best else [], notes, missing)


def _random(dtype: str, seed: int, device: Any) -> Any:
    """Numbers of about one, on the device; zeros would run at a higher clock."""
    generator = np.random.default_rng(seed)
    if dtype.startswith("float8"):
        bits = generator.integers(0, 256, (SIZE, SIZE), dtype=np.uint8) & 0xBF  # no NaN
    else:
        values = generator.standard_normal((SIZE, SIZE), dtype=np.float32)
        if dtype == "bfloat16":
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            bits = values.astype(dtype)
    tensor = tvm.runtime.tensor(bits, device=device)
    return tensor if str(bits.dtype) == dtype else tensor._create_view((SIZE, SIZE), dtype)


FAMILY = Family(
    "tensor", "tensor cores, by type and tile", ("tensor_flop_per_s",), measure, kernels
)
