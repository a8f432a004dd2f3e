"""A GPU whose profile is derived: the four rates that matter most are measured at first use.

    <cache folder>/gpus/<key>.json

A copy of the memory, reads of the L2, a product of float16 and a launch, by the benchmarks of
`calibrate`, which measures the rest, too. It takes 4.9 s on an H100, once: the key holds derived
numbers and so the GPU, its driver, and the versions of TVM and of this package. What fails or is
far from what was derived keeps the derived value. `TVM_FUSION_CALIBRATE=0` measures nothing.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from tvm import tirx

from ..._version import __version__
from ...config import HardwareProfile
from ...config.digest import digest
from ...errors import InputError
from ...host import interrupts
from ...host.atomic_files import replace_file
from ...host.cache_folder import cache_dir, make_folder
from ..cpu.host_profile import is_switched_off
from ..profile_file import driver_version
from . import bandwidth, launch, tensor
from .bench import Call, CudaBench

BUDGET_S = 5.0
"""What is not reached by then keeps its derived value; kernels are compiled before."""
FORMAT = 1
LEAST, MOST = 0.4, 1.6
"""Of a derived value: what is measured beyond was disturbed, or is not what was meant."""
L2_SHARE = 0.754
"""Of the rate of reads alone, what kernels were fitted with: 7.0e12 of 9.279e12 on an H200
(configs/nvidia_h200.toml, l2_bytes_per_s)."""
KERNELS = ("mb_read", "mb_copy")
TILE = 128 * 128
"""Results of a tile of the product: one of 128 x 256 takes NVRTC 3.5 s on Hopper."""
_log = logging.getLogger(__name__)


def gpu_profile(derived: HardwareProfile) -> HardwareProfile:
    """The derived profile of the GPU that is present, with what was measured of it, now if it never
    was.
    """
    return derived if is_switched_off() else _gpu_profile(derived)


@cache
def _gpu_profile(derived: HardwareProfile) -> HardwareProfile:
    path = calibration_file(derived)
    try:
        values = kept(path)
        if values is None:
            values = measured(derived)
            _keep(path, values)
    except KeyboardInterrupt:
        interrupts.check()  # a command ends; a program of its own goes on
        _log.warning("measuring %s was interrupted: plans are made by derived rates", derived.name)
        return derived
    except Exception as error:  # the boundary: the derived profile is there all the same
        _log.warning(
            "%s is not measured at first use (%s: %s): plans are made by derived rates",
            derived.name,
            type(error).__name__,
            " ".join(str(error).split())[:300],
        )
        return derived
    return with_values(derived, values)


def with_values(derived: HardwareProfile, values: Mapping[str, float]) -> HardwareProfile:
    """The profile with measured values; other types of tensor cores are in the ratio of float16."""
    taken = {name: values[name] for name in ("hbm_bytes_per_s", "l2_bytes_per_s") if name in values}
    if "launch_us" in values:
        taken["launch_us"] = values["launch_us"]
    if "float16" in values:
        rates = derived.tensor_flop_per_s
        ratio = values["float16"] / rates["float16"]
        taken["tensor_flop_per_s"] = {dtype: rate * ratio for dtype, rate in rates.items()}
    if not taken:
        return derived
    said = f"{derived.derived}; measured at first use: {', '.join(sorted(values))}"
    return replace(derived, **taken, derived=said)


def calibration_file(derived: HardwareProfile) -> Path:
    """Where the calibration of a GPU lies."""
    import tvm

    parts = [FORMAT, __version__, tvm.__version__, driver_version(), derived.fingerprint()]
    return cache_dir() / "gpus" / f"{digest(parts)}.json"


def kept(path: Path) -> dict[str, float] | None:
    """What was measured before; None where nothing was, or the file is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["values"]
        if all(0 < value < math.inf for value in values.values()):
            return {str(name): float(value) for name, value in values.items()}
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("the calibration %s is damaged (%s): measured again", path, error)
    return None


def _keep(path: Path, values: Mapping[str, float]) -> None:
    data = {"date": datetime.date.today().isoformat(), "values": dict(values)}
    try:
        make_folder(path.parent)
        replace_file(path, json.dumps(data, indent=1))
    except (OSError, InputError) as error:
        _log.warning("the calibration of this GPU cannot be kept: %s", error)


def measured(derived: HardwareProfile, budget_s: float = BUDGET_S) -> dict[str, float]:
    """The rates of the GPU that is present, by name, in the units of the profile."""
    kernels, products, share = kernels_of(derived)
    bench = CudaBench(derived, kernels, by_events=True)
    deadline = time.perf_counter() + budget_s
    found: dict[str, float] = {}
    for name, (measure, known) in _steps(derived, products, share).items():
        if time.perf_counter() > deadline:
            _log.info("%s: no time is left to measure %s", derived.name, name)
            break
        try:
            value = measure(bench)
        except Exception as error:  # a trial: recorded, and the next one is run
            _log.info("%s: %s is not measured: %s", derived.name, name, error)
            continue
        if LEAST * known <= value <= MOST * known:
            found[name] = value
        else:
            _log.info("%s: %s measured as %.4g, derived as %.4g", derived.name, name, value, known)
    return found


def kernels_of(hw: HardwareProfile) -> tuple[dict[str, tirx.PrimFunc], tensor.Products, float]:
    """All that is run, and of it the product of float16 with its share of the best tile's rate."""
    products, share = tensor.quick_product(hw, "float16", TILE)
    moves = bandwidth.kernels(hw)
    found = {name: moves[name] for name in KERNELS} | launch.kernels(hw)
    return found | {name: func for name, (_, _, func) in products.items()}, products, share


def _steps(
    hw: HardwareProfile, products: tensor.Products, share: float
) -> dict[str, tuple[Callable[[CudaBench], float], float]]:
    """What measures each rate, and what it is by derivation."""

    def product(bench: CudaBench) -> float:
        return max(tensor.rates(bench, products)["float16"].values()) / share

    return {
        "hbm_bytes_per_s": (_memory, hw.hbm_bytes_per_s),
        "float16": (product, hw.tensor_flop_per_s["float16"]),
        "launch_us": (launch.in_machine_us, hw.launch_us),
        "l2_bytes_per_s": (_l2, hw.l2_bytes_per_s),
    }


def _memory(bench: CudaBench) -> float:
    """A copy of half of what the buffers hold, one block for each piece."""
    count = bench.bytes // bandwidth.VECTOR // 2
    blocks = -(-count // (bandwidth.AHEAD * bandwidth.THREADS))
    taken = bench.times({0: Call("mb_copy", blocks, 1, count)}, repeats=3)[0]
    return 2 * count * bandwidth.VECTOR / taken


def _l2(bench: CudaBench) -> float:
    """Reads of a quarter of the L2, again and again."""
    count = bench.hw.l2_bytes // 4 // bandwidth.VECTOR
    size = count * bandwidth.VECTOR
    blocks = bandwidth.BLOCKS_PER_SM * bench.hw.num_sms
    trips = max(2, bandwidth.ROUND_BYTES // size)
    pair = (Call("mb_read", blocks, trips, count), Call("mb_read", blocks, 3 * trips, count))
    return L2_SHARE * size / bench.slopes({0: pair}, repeats=3)[0]
