"""The numbers of weights, computed once a model is compiled; see `ir.weights`.

main(x, stand-in)          ->   main(x, weight0)         the last step of lowering
permute_dims of a weight   ->   a tensor on the device   where the module is first called
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tvm
from tvm import relax
from tvm.runtime import Tensor

from ...config.targets import device_of
from ...errors import BuildError
from ...host.cores import use_all_cores
from ...ir.weights import Recipe, Weight, as_parameters, origins
from .destinations import Destinations

CHECKS = ("vm.builtin.check_tensor_info", "vm.builtin.match_shape")
STORED = 1  # MatchShapeCode::kStoreToHeap

Compile = Callable[[tvm.IRModule, tvm.target.Target], tuple[tvm.runtime.Module, Any]]
Kernels = dict[Recipe, Callable[..., None]]


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.WeightsAsParameters")
class WeightsAsParameters:
    """Makes parameters of the stand-ins of some functions, behind their inputs and `destinations`,
    and tells `found` for what.
    """

    def __init__(
        self,
        functions: Sequence[str],
        found: dict[str, tuple[Weight, ...]],
        destinations: Mapping[str, Destinations],
    ) -> None:
        self.functions, self.found, self.destinations = functions, found, destinations

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` without stand-ins."""
        beside = [one.function for one in self.destinations.values()]
        changed, found = as_parameters(mod, [*self.functions, *beside])
        self.found.update(found)
        return changed


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.TrustParameters")
class TrustParameters:
    """Takes out what looks at each weight in each call, whether it is a tensor of its shape (200 of
    them: 30 us): nobody but `WeightValues` gives them. Of functions with `destinations` that goes
    for all parameters; what tells symbolic sizes stays. Runs after VMShapeLower, which puts it in.
    """

    def __init__(
        self, found: Mapping[str, tuple[Weight, ...]], destinations: Mapping[str, Destinations]
    ) -> None:
        self.found, self.destinations = found, destinations

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` without these checks."""
        out = mod.clone()
        for name, weights in self.found.items():
            func = mod[name]
            own = func.params[len(func.params) - len(weights) :] if weights else []
            if any(one.function == name for one in self.destinations.values()):
                own = func.params
            if own:
                out.update_func(mod.get_global_var(name), _unchecked(func, set(own)))
        return out


def _unchecked(func: relax.Function, own: set[relax.Var]) -> relax.Function:
    def is_check(value: Any) -> bool:
        op = value.op if isinstance(value, tvm.ir.Call) else None
        known = isinstance(op, relax.ExternFunc) and op.global_symbol in CHECKS
        is_own = known and isinstance(value.args[0], relax.Var) and value.args[0] in own
        return is_own and not (op.global_symbol == CHECKS[1] and _tells(value))

    blocks = [
        relax.BindingBlock([b for b in block.bindings if not is_check(b.value)])
        for block in func.body.blocks
    ]
    body = relax.SeqExpr(blocks, func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _tells(match: tvm.ir.Call) -> bool:
    """Whether sizes of a tensor are kept: behind the tensor, the heap and the rank stand a code and
    a number for each axis.
    """
    return any(int(code.value) == STORED for code in match.args[3:-1:2])


class WeightValues:
    """What the functions of an executable take behind their inputs, on their device; computed when
    it is first asked for.

    Parameters
    ----------
    weights : mapping of str to tuple of Weight
        By function.
    target : tvm.target.Target
    compile_functions : callable
        `build.build_functions`.
    """

    def __init__(
        self,
        weights: Mapping[str, tuple[Weight, ...]],
        target: tvm.target.Target,
        compile_functions: Compile,
    ) -> None:
        self.weights, self.target = dict(weights), target
        self.origins = origins(w for each in self.weights.values() for w in each)
        self._compile = compile_functions
        self._device = device_of(target)
        self._lock = threading.Lock()
        self._values: dict[Weight, Tensor] | None = None
        self._begun: Future[Kernels] | None = None

    def __bool__(self) -> bool:
        return any(self.weights.values())

    def names(self) -> dict[str, list[str]]:
        """The names of the weights of each function."""
        return {name: [w.name for w in each] for name, each in self.weights.items()}

    def begin(self) -> None:
        """Have the kernels that compute them compiled beside what else is built, if there is a
        device; they take 0.5 to 0.8 s (H200, 2026-11-29).
        """
        if self._device.type != "cpu" and self._device.exist and self:
            pool = ThreadPoolExecutor(1, initializer=use_all_cores)
            self._begun = pool.submit(self._kernels)
            pool.shutdown(wait=False)

    def settle(self) -> None:
        """Compute them now, if there is a device: from now on the model may change its weights."""
        if not self._device.exist:
            return
        with self._lock:
            if self._values is None:
                self._values = self._computed()

    def of(self, function: str) -> list[Tensor]:
        """The tensors for a function."""
        self.settle()
        return [self._values[weight] for weight in self.weights.get(function, ())]

    def _computed(self) -> dict[Weight, Tensor]:
        kernels: Kernels = {}
        if self._begun is not None:
            kernels = self._begun.result()
        elif self._device.type != "cpu":
            kernels = self._kernels()
        found = {weight: _on(self._device, weight, kernels) for weight in self._wanted()}
        for weight, value in found.items():
            weight.settle(value)
        return found

    def _wanted(self) -> list[Weight]:
        return list(dict.fromkeys(w for each in self.weights.values() for w in each))

    def _kernels(self) -> Kernels:
        """Kernels for what is computed of weights; what has none is the host's to compute."""
        written = {w.recipe: None for w in self._wanted() if _is_of_known(w)}
        written = {recipe: recipe.kernel() for recipe in written}
        names = {r: f"weights_{n}" for n, (r, func) in enumerate(written.items()) if func}
        if not names:
            return {}
        own = {name: written[r].with_attr("global_symbol", name) for r, name in names.items()}
        try:
            library, _ = self._compile(tvm.IRModule(own), self.target)
        except BuildError:
            return {}
        return {recipe: library[name] for recipe, name in names.items()}


def _is_of_known(weight: Weight) -> bool:
    """Whether a weight is to be computed, of the model's own weights."""
    known = all(not isinstance(s, Weight) or s.value is not None for s in weight.sources)
    return weight.value is None and known


def _on(device: tvm.runtime.Device, weight: Weight, kernels: Kernels) -> Tensor:
    if device.type == "cpu":
        return weight.tensor()
    kernel = kernels.get(weight.recipe) if _is_of_known(weight) else None
    if kernel is None:
        given = weight.given()
        if given is not None and given.device.type != "cpu" and weight.settled:
            return given  # it was computed for another module
        return (weight.tensor() if given is None else given).copyto(device)
    out = tvm.runtime.empty(weight.shape, weight.dtype, device)
    kernel(*(_there(source, device) for source in weight.sources), out)
    return out


def _there(source: Weight | Tensor, device: tvm.runtime.Device) -> Tensor:
    found = source.given() if isinstance(source, Weight) else source
    return found if found.device.type != "cpu" else found.copyto(device)
