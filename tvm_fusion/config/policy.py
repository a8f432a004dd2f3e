"""Policy: what the planner may do; `tvm_fusion.config` reads it from ``configs/policy_*.toml``."""

from dataclasses import dataclass

from ..errors import ConfigError
from .toml import fingerprint, lists, number

_CHOICES = {
    "rounding": ("fast", "exact"),
    "launch": ("stream", "graph"),
    "probe": ("auto", "off"),
}
# Least values of the numbers.
_LEAST = {
    "max_recompute": 1,
    "min_gain": 0,
    "max_group_ops": 1,
    "coverage": 0,
    "unknown_ratio": 1,
    "unknown_ratio_gemm": 1,
    "probe_share": 0,
    "unmeasured_ratio": 1,
    "measure_budget_s": 0,
    "settle_budget_s": 0,
    "beam_width": 1,
    "exact_ops": 0,
    "search_evaluations": 0,
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the planner may do, and what it must win.

    Attributes
    ----------
    name : str
        For reports.
    rounding : str
        "fast": half values live in float32 inside a kernel and are rounded where they are stored;
        tensor cores may multiply float32 in parts, which takes less than 2^-21.9 off a product.
        "exact": every rounding of the unfused graph is kept.
    max_recompute : float
        How many times an operation may be computed for once in the unfused graph.
    min_gain : float
        Share of the predicted time of its operators one by one that a fusion has to save; less than
        1. What is measured to be faster is taken whatever it saves.
    max_group_ops : int
        Most operations in one group; conversions and moves of data do not count.
    launch : str
        "stream" or "graph": which launch cost a saved launch is worth.
    allow_rematerialisation : bool
        Whether a producer may be computed in several groups.
    verify : bool
        Whether compiled groups are checked against float64 before they are used.
    allow_tf32 : bool
        Whether tensor cores may round float32 operands of matrix products to tfloat32 (10 bits of
        mantissa).
    probe : str
        "auto": groups whose estimated registers or code are near a limit of the device are
        compiled before the plan is settled, where there is an nvcc. "off": estimates decide.
    learned : bool
        Whether the learned residual corrects the analytic model on devices that have one.
    coverage : float
        How often "together is faster than apart" has to hold for a fusion that is not measured;
        0 takes the prediction as it is. Used where the device has a learned residual.
    unknown_ratio, unknown_ratio_gemm : float
        Where there is no residual: by what factor the predicted ratio of a fusion's time to that of
        its operators apart may be too good, and the same for groups around matrix products. 1 takes
        the prediction as it is.
    unmeasured_ratio : float
        The same for a profile of a CPU, from a file, with a rate that nobody measured.
    probe_share : float
        Share of a limit from which on an estimate is near it.
    measure_budget_s : float
        Time for measurements, builds included; what was begun is finished.
    settle_budget_s : float
        Time for measuring fusions in doubt on the CPU of this machine where `measure` is not asked
        for but the result is checked anyway; 0 leaves them apart.
    beam_width : int
        Plans that the search keeps side by side while it improves a region.
    exact_ops : int
        Regions of at most so many operators are solved exactly.
    search_evaluations : int
        Groups that the search may evaluate to improve one region.
    sizes : pairs of str and tuple of int
        Symbolic sizes by name, and those at which their kernels for a GPU must be the fastest. In a
        file or a mapping: a table of lists, ``{"tokens": [1, 16, 512, 4096]}``. A name is that of a
        `torch.export.Dim`, of an axis of an input ("x.0"), or of a symbol of the module.
    """

    name: str
    rounding: str
    launch: str
    allow_rematerialisation: bool
    verify: bool
    allow_tf32: bool
    learned: bool
    probe: str
    max_recompute: float = number("1")
    min_gain: float = number("1")
    max_group_ops: int = number("count")
    coverage: float = number("1")
    unknown_ratio: float = number("1")
    unknown_ratio_gemm: float = number("1")
    unmeasured_ratio: float = number("1")
    probe_share: float = number("1")
    measure_budget_s: float = number("s")
    settle_budget_s: float = number("s")
    beam_width: int = number("count")
    exact_ops: int = number("count")
    search_evaluations: int = number("count")
    sizes: tuple[tuple[str, tuple[int, ...]], ...] = lists()

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise ConfigError(
                    f"policy {self.name}: {key} = {getattr(self, key)!r} is none of {choices}"
                )
        for key, low in _LEAST.items():
            if not getattr(self, key) >= low:
                raise ConfigError(f"policy {self.name}: {key} must be at least {low}")
        for key in ("coverage", "min_gain"):
            if not getattr(self, key) < 1:
                raise ConfigError(f"policy {self.name}: {key} must be less than 1")

    def fingerprint(self) -> str:
        """Return a hash of all values but the name."""
        return fingerprint(self, without=("name", *(() if self.sizes else ("sizes",))))
