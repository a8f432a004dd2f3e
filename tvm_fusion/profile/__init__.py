"""Where the time of a call goes: `python -m tvm_fusion profile MODEL`.

compile as `compile` does -> record calls, before and after fusion -> times, bytes, gaps, memory
  -> text, JSON, a trace for Perfetto, ranges for Nsight

from tvm_fusion.profile.measured import profile
found = profile("model.onnx", "llvm")
print(found)
"""
