"""Calls of a model as its source has them: tensors stay between calls, results have any structure
(`ir.convention`).

    compiled(x)  ->  main(x, *state)  ->  new state, what is written to inputs, and results

A call takes the values that the one before has left. Results are tensors of `main`, the caller's
own inputs where the model returns these, views where a caller gives tensors of torch that are
contiguous, and numbers. What `main` gives in the memory of something else (`y, y.clone()`, which it
computes once, or a constant) is copied: whoever writes to a result changes nothing else. Complex
tensors, which `main` takes and gives as pairs of real numbers, are views of these.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tvm

from ...errors import InputError
from ...ir.convention import BARE, OF_PROCESS, Convention, Of, View
from .call_memory import evaluated
from .signature import InputSpec, Signature
from .tensors import Kind, describe, from_tvm, is_torch_tensor, to_tvm

_log = logging.getLogger(__name__)


class SourceCalls:
    """The state of a compiled model, and how its results are put together.

    Parameters
    ----------
    convention : Convention
    specs : sequence of InputSpec
        All parameters of `main`.
    own : sequence of bool
        Of its outputs, whether they have memory of their own.

    Attributes
    ----------
    shared : frozenset of int
        The outputs that callers get copies of.
    """

    def __init__(
        self, convention: Convention, specs: Sequence[InputSpec], own: Sequence[bool] = ()
    ) -> None:
        self.convention = convention
        self.lock = threading.RLock()  # a call reads and writes the state
        self.specs = {number: specs[number] for number in convention.parameters}
        self._values: dict[int, tvm.runtime.Tensor] = dict(convention.values)
        self._pairs = frozenset(convention.pairs)
        given = {r.value for r in convention.results if r.of is Of.OUTPUT and r.view is None}
        self.shared = frozenset(number for number in given if not all(own[number : number + 1]))

    @property
    def missing(self) -> list[str]:
        """The tensors that have no values yet, by name."""
        return [name for name, n in self.convention.state.items() if n not in self._values]

    def values(self, device: tvm.runtime.Device) -> list[tvm.runtime.Tensor]:
        """What is kept, on a device; raises InputError where something has no values yet."""
        if self.missing:
            raise InputError(
                f"{len(self.missing)} tensors of the model have no values yet "
                f"({', '.join(self.missing[:5])}{', ...' if len(self.missing) > 5 else ''}): it "
                "was compiled without; give them to load_state_dict"
            )
        for number in self.specs:
            if self._values[number].device != device:
                self._values[number] = self._values[number].copyto(device)
        return [self._values[number] for number in self.specs]

    def renew(self, outputs: Sequence[tvm.runtime.Tensor], own: Sequence[bool]) -> None:
        """Keep what a call has computed for the next one; memory that is not the outputs' `own` may
        be the caller's, and is copied.
        """
        for number, output in self.convention.updates.items():
            if number in self.specs:
                value = outputs[output]
                is_own = output < len(own) and own[output]
                self._values[number] = value if is_own else value.copyto(value.device)

    def tensors_of(self, inputs: Sequence[Any], count: int) -> Sequence[Any]:
        """The tensors among what a caller gives; he may leave all else out.

        Raises
        ------
        InputError
            A number or text is another than the one that is compiled.
        """
        fixed = self.convention.fixed
        if not fixed or len(inputs) != count + len(fixed):
            return inputs
        for place, value in fixed.items():
            if not _equal(inputs[place], value):
                raise InputError(
                    f"input {place} is {inputs[place]!r}, and the module is compiled for {value!r} "
                    "there, which was among the example inputs: compile it for the other value, "
                    "too, or have the model take a tensor"
                )
        return [x for place, x in enumerate(inputs) if place not in fixed]

    def given(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """A caller's inputs as `main` takes them: complex ones are views of pairs, which he may
        give as well.
        """
        if not self._pairs:
            return inputs
        found = [_pairs_of(x) if n in self._pairs else x for n, x in enumerate(inputs)]
        for number in self._pairs.intersection(self.convention.updates):
            value = inputs[number] if number < len(inputs) else None
            if is_torch_tensor(value) and value.is_conj():
                raise InputError(
                    f"input {number} is written to, but it is a conjugate that PyTorch has not "
                    "computed: pass x.resolve_conj()"
                )
        return found

    # ---- what stays, by name
    def state_dict(self) -> dict[str, Any]:
        """Copies of what has values, as tensors of torch where that is loaded, else as arrays."""
        kind = Kind.TORCH if "torch" in sys.modules else Kind.NUMPY
        with self.lock:
            known = {n: v for n, v in self.convention.state.items() if v in self._values}
            copies = {v: self._values[v].copyto(tvm.cpu()) for v in dict.fromkeys(known.values())}
        found = {v: from_tvm(copy, kind, "cpu") for v, copy in copies.items()}
        return {
            name: _complex_of(found[v]) if v in self._pairs else found[v]
            for name, v in known.items()
        }

    def load_state_dict(self, values: Mapping[str, Any], strict: bool = True) -> None:
        """See `CompiledModule.load_state_dict`."""
        state = self.convention.state
        unknown = [name for name in values if name not in state]
        if unknown and strict:
            raise InputError(
                f"{len(unknown)} names are no state of the compiled model ({unknown[0]}, ...): "
                "weights that had values when it was compiled are constants of it. Compile it on "
                "the meta device to load all, or pass strict=False"
            )
        found = {}
        for name, value in values.items():
            if name in state:
                value = _pairs_of(value) if state[name] in self._pairs else value
                self._check(name, value)
                found[state[name]] = _copied(value, name)
        with self.lock:
            lacking = [n for n in self.missing if state[n] not in found]
            if lacking and strict:
                raise InputError(
                    f"{len(lacking)} tensors of the model are given no values "
                    f"({', '.join(lacking[:5])}); give them too, or pass strict=False"
                )
            self._values |= found

    def _check(self, name: str, value: Any) -> None:
        spec = self.specs[self.convention.state[name]]
        dtype, shape = describe(value)
        if (dtype, shape) != (spec.dtype, spec.shape):
            raise InputError(
                f"{name}: expected {spec.dtype} {spec.shape}, got {dtype} {shape}; give the "
                "weights of the model that was compiled"
            )

    # ---- results
    def results(
        self, signature: Signature, inputs: Sequence[Any], outputs: Sequence[Any], kind: Kind
    ) -> Any:
        """What the caller gets, of the outputs of `main` as tensors of his kind."""
        outputs = [_apart(x, kind) if n in self.shared else x for n, x in enumerate(outputs)]
        leaves: list[Any] = []
        extents: Mapping[str, int] | None = None
        for result in self.convention.results:
            if result.of is Of.OUTPUT:
                output = outputs[result.value]
                leaves.append(_complex_of(output) if result.is_complex else output)
            elif result.of is Of.INPUT:
                leaves.append(inputs[result.value])
            elif result.of is Of.VALUE:
                leaves.append(result.value)
            else:
                if extents is None:
                    extents = signature.check([describe(value) for value in self.given(inputs)])
                leaves.append(evaluated(result.value, extents))
        if kind is Kind.TORCH:
            for number, result in enumerate(self.convention.results):
                if result.view is not None:
                    leaves[number] = _view(result.view, inputs, leaves, leaves[number])
        return self._put_together(leaves)

    @cached_property
    def _put_together(self) -> Callable[[list[Any]], Any]:
        structure = self.convention.structure
        if structure is None:
            return tuple
        if structure == BARE:
            return lambda leaves: leaves[0]
        try:
            from torch.utils import _pytree

            known = OF_PROCESS.get(structure)
            spec = _pytree.treespec_loads(structure) if known is None else known
        except (ImportError, NotImplementedError, ValueError, KeyError) as error:
            _log.warning("results are flat tuples, their class is not known here: %s", error)
            return tuple
        return lambda leaves: _pytree.tree_unflatten(leaves, spec)


def _equal(given: Any, value: Any) -> bool:
    both_nan = given != given and value != value
    return type(given) is type(value) and (given == value or both_nan)


def _pairs_of(value: Any) -> Any:
    """A complex tensor as its real and imaginary parts, along a last axis; others as they are."""
    if is_torch_tensor(value) and value.is_complex():
        return sys.modules["torch"].view_as_real(value.detach().resolve_conj())
    if isinstance(value, np.ndarray) and value.dtype.kind == "c":
        return value[..., None].view(value.real.dtype)
    return value


def _complex_of(pairs: Any) -> Any:
    """The complex tensor of pairs; those of TVM, which has none, as they are."""
    if is_torch_tensor(pairs):
        return sys.modules["torch"].view_as_complex(pairs)
    if isinstance(pairs, np.ndarray) and pairs.dtype.name in _COMPLEX:
        return pairs.view(_COMPLEX[pairs.dtype.name])[..., 0]
    return pairs


_COMPLEX = {"float32": "complex64", "float64": "complex128"}


def _copied(value: Any, name: str) -> tvm.runtime.Tensor:
    """Memory of our own: callers go on with theirs."""
    if is_torch_tensor(value):
        if value.device.type == "meta":
            raise InputError(f"{name}: it is on the meta device, and has no values; give some")
        value = value.detach().cpu()
    return to_tvm(value, tvm.cpu(), name).copyto(tvm.cpu())


def _apart(value: Any, kind: Kind) -> Any:
    """A tensor in memory of its own; arrays are copies already."""
    if kind is Kind.NUMPY:
        return value
    return value.clone() if kind is Kind.TORCH else value.copyto(value.device)


def _view(view: View, inputs: Sequence[Any], leaves: Sequence[Any], copy: Any) -> Any:
    """A view of another tensor of torch, where that lies as it was assumed; else the copy."""
    base = (inputs if view.of is Of.INPUT else leaves)[view.number]
    if not is_torch_tensor(base) or not base.is_contiguous() or base.device != copy.device:
        return copy
    return base.as_strided(view.shape, view.strides, base.storage_offset() + view.offset)
