"""Memory formats: torch tensors that lie with channels last are taken and returned as they lie.

    Before    def main(x: [N, C, H, W]): ...                      x.contiguous() is given
    After     def main(x: [N, H, W, C]):
                  x1 = permute_dims(x, (0, 3, 1, 2)); ...          x.permute(0, 2, 3, 1) is given

The permutations at the border vanish where convolutions are computed with channels last
(`AssignLayouts`), so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op

from .orders import channels_last, ordered

FORMATS_ATTR = "tvm_fusion.channels_last"


@dataclass(frozen=True, slots=True)
class MemoryFormats:
    """Which tensors of a model lie with channels last.

    Attributes
    ----------
    inputs, outputs : tuple of bool
        Of each, in order.
    """

    inputs: tuple[bool, ...] = ()
    outputs: tuple[bool, ...] = ()

    @classmethod
    def of_module(cls, mod: tvm.IRModule) -> MemoryFormats | None:
        """Those of a module that `with_formats` made; None for another."""
        attrs = mod["main"].attrs or {}
        return cls.from_json(attrs[FORMATS_ATTR]) if FORMATS_ATTR in attrs else None

    def fits(self, mod: tvm.IRModule) -> bool:
        """Whether some tensor lies so, and `main` of a module takes and gives as many."""
        main = mod["main"]
        is_tuple = isinstance(main.ret_ty, relax.TupleType)
        results = main.ret_ty.fields if is_tuple else [main.ret_ty]
        counts = len(main.params), len(results)
        known = all(isinstance(t, relax.TensorType) for t in results)
        same = counts == (len(self.inputs), len(self.outputs))
        return known and same and any((*self.inputs, *self.outputs))

    def to_json(self) -> dict[str, list[bool]]:
        """Return plain values for `from_json`."""
        return {"inputs": list(self.inputs), "outputs": list(self.outputs)}

    @classmethod
    def from_json(cls, values: Mapping[str, Sequence[Any]]) -> MemoryFormats:
        """Inverse of `to_json`."""
        return cls(*(tuple(bool(last) for last in values[k]) for k in ("inputs", "outputs")))


def takes_formats(target: tvm.target.Target) -> bool:
    """Whether tensors are taken and given as they lie: where convolutions have channels last."""
    return target.kind.name != "llvm"


def channels_first(rank: int) -> tuple[int, ...]:
    """From channels last to the order of the model."""
    return (0, rank - 1, *range(1, rank - 1))


def with_formats(mod: tvm.IRModule, formats: MemoryFormats) -> tvm.IRModule:
    """The module with permutations at its borders, for tensors in these formats, which it tells.

    Parameters
    ----------
    mod : IRModule
    formats : MemoryFormats
        They fit the module.
    """
    main, builder = mod["main"], relax.BlockBuilder(mod)
    params, taken = [], []
    for param, last in zip(main.params, formats.inputs, strict=True):
        params.append(param)
        if last:
            shape = ordered(list(param.ty.shape), channels_last(param.ty.ndim))
            params[-1] = relax.Var(param.name, relax.TensorType(shape, param.ty.dtype))
            value = op.permute_dims(params[-1], list(channels_first(len(shape))))
            taken.append(relax.VarBinding(param, builder.normalize(value)))
    is_tuple = isinstance(main.ret_ty, relax.TupleType)
    types = list(main.ret_ty.fields) if is_tuple else [main.ret_ty]
    results, given = [], []
    for number, (type_, last) in enumerate(zip(types, formats.outputs, strict=True)):
        result = main.body.body
        if is_tuple:
            result = relax.Var(f"result{number}", type_)
            given.append(relax.VarBinding(result, relax.TupleGetItem(main.body.body, number)))
        if last:
            value = builder.normalize(op.permute_dims(result, list(channels_last(type_.ndim))))
            result = relax.Var(f"result{number}_last", value.ty)
            given.append(relax.VarBinding(result, value))
        results.append(result)
    blocks = [relax.BindingBlock(taken), *main.body.blocks, relax.BindingBlock(given)]
    output = relax.Tuple(results) if is_tuple else results[0]
    type_ = relax.TupleType([r.ty for r in results]) if is_tuple else results[0].ty
    body = relax.SeqExpr([block for block in blocks if block.bindings], output)
    found = mod.clone()
    func = relax.Function(params, body, type_, main.is_pure, main.attrs)
    func = func.with_attr(FORMATS_ATTR, formats.to_json())
    found.update_func(mod.get_global_var("main"), func)
    passes = [
        relax.transform.Normalize(),
        relax.transform.ConvertToDataflow(min_size=1),
        relax.transform.CanonicalizeBindings(),
    ]
    return tvm.transform.Sequential(passes)(found)
