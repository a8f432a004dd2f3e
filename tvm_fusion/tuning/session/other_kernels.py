"""What else may compute an operator whose kernel gives wrong numbers, before TVM's own code does:

    what tuning chose -> the class's best configuration -> other configurations, of other forms
    first -> what the class `fallback` writes, where that is another kernel

On a CPU one writer serves all classes of this package, without configurations: there is nothing
else there, but for the classes that users add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...kernels.cpu.contraction.panels import without_constants
from ...plan.plan import FALLBACK, FusionPlan
from ...runtime.build.lowering import SCHEDULED_ATTR
from ...transform.apply.write_kernels import Tuned, write_kernel
from ..measure.building import written
from .choices import CLASS_CHOICE, DEFAULT, ranked_configs, text_of
from .tasks import key_of, workload_of

# Each costs a build and a check, and a bug of a class's frame is in all of its configurations.
MOST_CONFIGURATIONS = 2


class OtherKernels:
    """Stands in for what tuning chose (`tuned`), with other configurations for the functions whose
    kernels were wrong.
    """

    def __init__(self, tuned: Tuned | None, hw: HardwareProfile, policy: Policy) -> None:
        self._tuned, self._hw, self._policy = tuned, hw, policy
        self._left: dict[str, list[str]] = {}
        self._now: dict[str, str] = {}

    def reject(self, func: tirx.PrimFunc, class_name: str) -> str | None:
        """Go on to the next configuration for a function; its text, or None where none is left."""
        key = self._key(func, class_name)
        if key not in self._left:
            self._left[key] = self._offered(func, class_name)
        if not self._left[key]:
            return None
        self._now[key] = self._left[key].pop(0)
        return self._now[key]

    def falls_back(self, func: tirx.PrimFunc, class_name: str) -> bool:
        """Whether the class `fallback` writes another kernel than the class does; on a GPU it
        leaves all to TVM.
        """
        if class_name == FALLBACK:
            return False
        try:
            kernels = [
                write_kernel(func, name, self._hw, self._policy) for name in (class_name, FALLBACK)
            ]
        except Unsupported:
            return False
        return SCHEDULED_ATTR in kernels[1].attrs and not tvm_ffi.structural_equal(*kernels)

    def _offered(self, func: tirx.PrimFunc, class_name: str) -> list[str]:
        """Texts of what may be tried in turn, after what is written now."""
        chosen = self._tuned.choice(func, class_name, self._policy) if self._tuned else ""
        try:
            ranked = ranked_configs(without_constants(func), class_name, self._hw, self._policy)
        except Unsupported:
            return []
        best, *others = [config for _, config in ranked] or [None]
        texts = dict.fromkeys(map(text_of, _one_of_each_form_first(best, others)))
        tried = (text_of(best), chosen.removeprefix(f"{CLASS_CHOICE} "))
        others = [text for text in texts if text not in tried][:MOST_CONFIGURATIONS]
        return [DEFAULT, *others] if chosen else others

    # ---- as write_kernels asks for it

    def plan(self, mod: tvm.IRModule, hw: HardwareProfile, policy: Policy) -> FusionPlan | None:
        """As `TunedKernels.plan`."""
        return None if self._tuned is None else self._tuned.plan(mod, hw, policy)

    def choice(self, func: tirx.PrimFunc, class_name: str, policy: Policy) -> str:
        """As `TunedKernels.choice`."""
        text = self._now.get(self._key(func, class_name))
        if text is None:
            return self._tuned.choice(func, class_name, policy) if self._tuned else ""
        return "" if text == DEFAULT else f"{CLASS_CHOICE} {text}"

    def kernel(
        self, func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
    ) -> tirx.PrimFunc | None:
        """As `TunedKernels.kernel`."""
        text = self._now.get(self._key(func, class_name))
        if text is None:
            return self._tuned.kernel(func, class_name, hw, policy) if self._tuned else None
        return written(workload_of(func, class_name, policy), CLASS_CHOICE, text, hw, policy)

    def told(
        self, func: tirx.PrimFunc, class_name: str, policy: Policy
    ) -> Mapping[str, Any] | None:
        """As `TunedKernels.told`; of a kernel that was wrong, that it is not used."""
        said = self._tuned.told(func, class_name, policy) if self._tuned else None
        if said is None or self._key(func, class_name) not in self._now:
            return said
        return {"workload": said["workload"], "choice": DEFAULT, "stale": "wrong numbers"}

    def _key(self, func: tirx.PrimFunc, class_name: str) -> str:
        """The same for a group by itself, whose operands are no constants of the module."""
        return key_of(workload_of(without_constants(func), class_name, self._policy))


def configuration(
    func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
) -> str | None:
    """The configuration that the untuned kernel of a function is written in, as text; None where
    its class has none.

    Raises
    ------
    Unsupported
        The class cannot write it.
    """
    ranked = ranked_configs(func, class_name, hw, policy)
    return text_of(ranked[0][1]) if ranked and ranked[0][1] is not None else None


def _one_of_each_form_first(best: Any, others: Sequence[Any]) -> list[Any]:
    """The configurations of a class beside its best: a bug is likely to be in all of a form."""
    seen, first, rest = {_form(best)}, [], []
    for config in others:
        (rest if _form(config) in seen else first).append(config)
        seen.add(_form(config))
    return first + rest


def _form(config: Any) -> tuple[str, Any]:
    return type(config).__name__, getattr(config, "form", None)
