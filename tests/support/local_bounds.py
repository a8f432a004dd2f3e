"""Whether kernels stay inside the buffers that they allocate."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad, Var


def outside(body: tirx.Stmt) -> list[str]:
    """Accesses of buffers that a kernel allocates which may lie outside, over all its loops."""
    found: list[str] = []
    analyzer = tvm.sym.Analyzer()
    own: set[Var] = set()

    def check(buffer: Var, indices) -> None:
        if buffer not in own:
            return
        for index, extent in zip(indices, buffer.ty.shape, strict=True):
            bound = analyzer.const_int_bound(index)
            if bound.min_value < 0 or bound.max_value >= int(extent):
                found.append(f"{buffer.name} of {extent} at {index}: to {bound.max_value}")

    def look(expr) -> None:
        loads: list[TensorLoad] = []
        tvm_ffi.structural_walk(expr, [(TensorLoad, loads.append)])
        for load in loads:
            if not any(isinstance(i, tirx.Ramp) for i in load.indices):
                check(load.source, load.indices)

    def visit(stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                visit(part)
        elif isinstance(stmt, tirx.AllocBuffer):
            own.add(stmt.buffer)
        elif isinstance(stmt, tirx.For):
            most = analyzer.const_int_bound(stmt.extent).max_value
            analyzer.bind(stmt.loop_var, tvm.ir.Range(stmt.min, stmt.min + most))
            visit(stmt.body)
        elif isinstance(stmt, tirx.Bind):
            look(stmt.value)
            bound = analyzer.const_int_bound(stmt.value) if "int" in str(stmt.var.ty) else None
            if bound is not None:
                low, high = (tirx.IntImm("int64", v) for v in (bound.min_value, bound.max_value))
                analyzer.bind(stmt.var, tvm.ir.Range(low, high + 1))
        elif isinstance(stmt, tirx.IfThenElse):
            visit(stmt.then_case)
            if stmt.else_case is not None:
                visit(stmt.else_case)
        elif isinstance(stmt, tirx.BufferStore):
            look(stmt.value)
            if not any(isinstance(i, tirx.Ramp) for i in stmt.indices):
                check(stmt.buffer, stmt.indices)
        elif not isinstance(stmt, tirx.Evaluate):
            raise TypeError(type(stmt))

    visit(body)
    return found
