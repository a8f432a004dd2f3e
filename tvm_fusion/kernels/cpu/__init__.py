"""CPU kernels: loops for LLVM."""
