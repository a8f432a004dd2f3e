"""What is measured: operators and layers as plain torch modules, with their inputs.

`memory` is the twelve that the figures of the project name, `memory_more` other shapes and
operators that memory binds too, `gemm` matrix products with what is around them, `gemm_sweep` those
in sizes of every kind, `small` what the launches bind. `attention` is attention alone,
`transformers` that and layers of models. `conv` is convolutions of every kind with what stands
behind them, `vision` whole convolutional networks. `compile_time` is whole models, of which the
time to compile them is measured (`tests.benchmarks.compile_time`), on a GPU, `compile_time_cpu` one
on a CPU. `cpu`, `cpu_products` and `cpu_models` are in
the sizes of a CPU. What is `FOR_TUNING`, operators for which schedules are evolved, is in no suite.
`held_classes` is drawn by seeds, programs that nobody tuned for (`held`).
Apart stand `real_models`, of transformers and timm through `torch.compile`, `tensor_parallel`,
layers on several devices, and `symbolic`, programs whose sizes a call tells, each in a folder of
its name beside this one.
"""

import difflib
from collections.abc import Iterable

from tvm_fusion.errors import InputError

from .attention import ATTENTION
from .contiguous import CONTIGUOUS
from .conv import CONV
from .cpu import CPU, CPU_PRODUCTS
from .cpu_models import CPU_MODELS
from .gemm import GEMM
from .gemm_sweep import SWEEP
from .held import SEEDS, held, names_of_seed
from .held import SUITE as HELD_CLASSES
from .instance import Instance, Workload
from .layout import LAYOUT
from .memory import MEMORY
from .models import MODELS
from .rows import ROWS
from .small import SMALL
from .training import TRAINING
from .transformers import TRANSFORMERS
from .unwritten import UNWRITTEN_CPU, UNWRITTEN_GPU
from .vision import VISION
from .whole_models import WHOLE_MODELS, WHOLE_MODELS_CPU

MEMORY_MORE: dict[str, Workload] = ROWS | LAYOUT | TRAINING
ON_CPUS: dict[str, Workload] = CPU | CPU_PRODUCTS | CPU_MODELS
WORKLOADS: dict[str, Workload] = (
    MEMORY | MODELS | MEMORY_MORE | GEMM | SWEEP | SMALL | ATTENTION | TRANSFORMERS | ON_CPUS
)
WORKLOADS |= CONV | VISION | CONTIGUOUS
FOR_TUNING: dict[str, Workload] = UNWRITTEN_GPU | UNWRITTEN_CPU
KNOWN: dict[str, Workload] = WORKLOADS | FOR_TUNING | WHOLE_MODELS | WHOLE_MODELS_CPU
SUITES = {
    "memory": tuple(MEMORY),
    "memory_more": tuple(MEMORY_MORE),
    "flow": (*MEMORY, "demo_block"),
    "models": (*MEMORY, *MODELS),
    "gemm": (*GEMM, "linear_bias_gelu", "swiglu_mlp"),
    "gemm_sweep": tuple(SWEEP),
    "small": tuple(SMALL),
    "attention": tuple(ATTENTION),
    "transformers": (*ATTENTION, "attention", "block", "demo_block", *TRANSFORMERS),
    "conv": (*CONV, "conv_bn_relu"),
    "vision": tuple(VISION),
    "contiguous": tuple(CONTIGUOUS),
    "compile_time": (*WHOLE_MODELS, "efficientnet_b0_b1"),
    "compile_time_cpu": tuple(WHOLE_MODELS_CPU),
    "cpu": tuple(CPU),
    "cpu_products": tuple(CPU_PRODUCTS),
    "cpu_models": tuple(CPU_MODELS),
    HELD_CLASSES: tuple(name for seed in SEEDS for name in names_of_seed(seed)),
    "all": (*MEMORY, *MODELS, *MEMORY_MORE),
}


def workload(name: str) -> Workload:
    """The workload of a name; raises InputError where there is none."""
    found = KNOWN.get(name) or held(name)
    if found is None:
        close = difflib.get_close_matches(name, (*KNOWN, *SUITES[HELD_CLASSES]), 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(WORKLOADS)}"
        raise InputError(f"unknown workload {name!r}; {hint}")
    return found


def require(names: Iterable[str]) -> None:
    """Raise InputError for a name that is no workload's."""
    for name in names:
        workload(name)


def names_of(suite: str, only: str | None, seed: int | None = None) -> tuple[str, ...]:
    """Return the workloads of suites or workloads given by commas, or the chosen ones of them;
    those of `held_classes` of one seed, if it is given.

    Raises
    ------
    InputError
        If there is no such suite or workload.
    """
    names: dict[str, None] = {}
    for word in _words(suite):
        if word not in SUITES and word not in KNOWN and held(word) is None:
            close = difflib.get_close_matches(word, (*SUITES, *KNOWN), 1)
            hint = f"did you mean {close[0]!r}?" if close else f"the suites are {', '.join(SUITES)}"
            raise InputError(f"unknown suite or workload {word!r}; {hint}")
        drawn = seed is not None and word == HELD_CLASSES
        names |= dict.fromkeys(names_of_seed(seed) if drawn else SUITES.get(word, (word,)))
    chosen = names if only is None else _words(only)
    for name in chosen:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"
            raise InputError(f"--only: {name!r} is no workload of {suite}; {hint}")
    if not chosen:
        raise InputError("no workload is named")
    return tuple(name for name in names if name in chosen)


def dtype_of(name: str, default: str) -> str:
    """Return the dtype that a workload names for itself, or the default."""
    return workload(name).dtype or default


def make(name: str, device: str, dtype: str, scale: float = 1.0) -> Instance:
    """Make a workload; equal arguments give equal values.

    Parameters
    ----------
    name : str
        A key of `KNOWN`, or of a program of `held`.
    device : str
        torch's name of a device.
    dtype : str
        Of weights and floating-point inputs.
    scale : float
        Factor on every large extent, none below 64.
    """
    return workload(name).instance(name, device, dtype, scale)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
