"""Read and write regions of blocks, computed again from their bodies."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx


def fix_regions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Computes the read and write regions of every block again from its body."""

    def rebuild(block):
        if block.name_hint == "root":
            return block
        buffers: dict = {}

        def load(e) -> None:
            buffers[e.source] = e.source

        def store(s) -> None:
            buffers[s.buffer] = s.buffer

        both = [(tvm.ir.TensorLoad, load), (tirx.BufferStore, store)]
        tvm_ffi.structural_walk(block.body, both)
        if block.init is not None:
            tvm_ffi.structural_walk(block.init, both)
        reads, writes = s_tir.analysis.get_sblock_read_write_region(block, buffers)
        return s_tir.SBlock(
            block.iter_vars,
            reads,
            writes,
            block.name_hint,
            block.body,
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            block.annotations,
            block.span,
        )

    return func.with_body(tvm_ffi.structural_map(func.body, [(s_tir.SBlock, rebuild)]))
