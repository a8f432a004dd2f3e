# %% [markdown]
# # 10. Deploying
#
# **Question.** The model is compiled. What do I put on the machine that serves it, and what has
# to be installed there?
#
# A shared library, and TVM's runtime. Neither this package, nor Python, nor a compiler.

# %%
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion

folder = tempfile.TemporaryDirectory()
library = Path(folder.name) / "model.so"

# %% [markdown]
# ## Save


# %%
@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((8, 32), "float32"), scale: R.Tensor((32,), "float32")):
        with R.dataflow():
            y = R.nn.softmax(R.multiply(R.nn.relu(x), scale), axis=-1)
            R.output(y)
        return y


compiled = tvm_fusion.compile(Model, "llvm")
compiled.save(library)
for file in sorted(library.parent.iterdir()):
    print(f"{file.name:15} {file.stat().st_size / 1e3:6.1f} kB")

# %% [markdown]
# `model.so` has the kernels, the constants and the program of TVM's virtual machine.
# `model.so.json` has what the library does not say: the signature, the plan, the report. It is
# needed by `load` alone.
#
# ## With this package
#
# `load` gives back what `compile` returned: checked inputs, torch tensors, CUDA graphs.

# %%
x = np.linspace(-1, 1, 256, dtype="float32").reshape(8, 32)
scale = np.linspace(0.5, 1.5, 32, dtype="float32")
wanted = np.asarray(compiled(x, scale))

loaded = tvm_fusion.CompiledModule.load(library)
np.testing.assert_array_equal(np.asarray(loaded(x, scale)), wanted)
assert loaded.plan == compiled.plan
print(loaded.report.splitlines()[0])

# %% [markdown]
# ## From Python, with TVM alone
#
# Another process, which never imports `tvm_fusion` (the assertion in it would fail). TVM takes as
# many threads as `TVM_NUM_THREADS` says before its first kernel, or half of the machine's.

# %%
np.save(library.with_name("x.npy"), x)
np.save(library.with_name("scale.npy"), scale)
ALONE = """
import sys
sys.modules["torch"] = None  # TVM imports it where it is there; that takes seconds
import numpy as np
import tvm
from tvm import relax

vm = relax.VirtualMachine(tvm.runtime.load_module("model.so"), tvm.cpu())
y = vm["main"](*(tvm.runtime.tensor(np.load(f"{name}.npy")) for name in ("x", "scale")))
np.save("y.npy", y.numpy())
assert not [name for name in sys.modules if name.startswith("tvm_fusion")]
"""
subprocess.run([sys.executable, "-c", ALONE], cwd=library.parent, check=True)
np.testing.assert_array_equal(np.load(library.with_name("y.npy")), wanted)
print("the same numbers, to the last bit")

# %% [markdown]
# ## From C++, with TVM's runtime alone
#
# The virtual machine is reached through `tvm-ffi`, whose headers come with the wheel. A program
# loads the library, makes a virtual machine of it, says which devices there are, and calls
# functions by name. Tensors are DLPack's: memory of yours, with a shape, at an address that is a
# multiple of 64 bytes. (Python is lenient there and copies what is not; a program that passes
# other addresses crashes.)

# %%
PROGRAM = r"""
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace ffi = tvm::ffi;

struct Memory {  // how tvm-ffi allocates a tensor of ours: kernels load vectors of 64 bytes
  void AllocData(DLTensor* tensor) {
    size_t bytes = (ffi::GetDataSize(*tensor) + 63) / 64 * 64;
    tensor->data = std::aligned_alloc(64, bytes);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor tensor(std::vector<int64_t> shape) {
  return ffi::Tensor::FromNDAlloc(Memory(), ffi::Shape(shape), DLDataType{kDLFloat, 32, 1},
                                  DLDevice{kDLCPU, 0});
}

int main(int, char** arguments) {
  // The runtime registers the loaders of modules with tvm-ffi.
  if (!dlopen(arguments[2], RTLD_NOW | RTLD_GLOBAL)) return std::puts(dlerror()), 1;
  ffi::Module library = ffi::Module::LoadFromFile(arguments[1]);
  ffi::Module vm =
      library->GetFunction("vm_load_executable", true).value()().cast<ffi::Module>();
  const int kPooled = 2;  // an allocator that keeps memory for the next call
  vm->GetFunction("vm_initialization", true).value()(int(kDLCPU), 0, kPooled);
  ffi::Function run = vm->GetFunction("main", true).value();

  ffi::Tensor x = tensor({8, 32}), scale = tensor({32});
  for (int i = 0; i < 8 * 32; ++i) static_cast<float*>(x.data_ptr())[i] = -1 + 2.0f * i / 255;
  for (int i = 0; i < 32; ++i) static_cast<float*>(scale.data_ptr())[i] = 0.5f + i / 31.0f;
  ffi::Tensor y = run(x, scale).cast<ffi::Tensor>();
  for (int i = 0; i < 8 * 32; ++i) std::printf("%.9g\n", static_cast<float*>(y.data_ptr())[i]);
}
"""
runtime = next(Path(tvm.__file__).parent.rglob("libtvm_runtime.so"))
ffi_library = Path(tvm_ffi.libinfo.find_libtvm_ffi())


def flags(compiler):
    """The command that builds the program."""
    return [
        *(compiler, "-std=c++17", "-O0", "main.cc", "-o", "program"),
        f"-I{tvm_ffi.libinfo.find_include_path()}",
        *(str(ffi_library), f"-Wl,-rpath,{ffi_library.parent}", "-ldl"),
    ]


compiler = shutil.which("g++") or shutil.which("clang++")
if compiler is None:
    print("there is no C++ compiler here")
else:
    library.with_name("main.cc").write_text(PROGRAM)
    subprocess.run(flags(compiler), cwd=library.parent, check=True)
    done = subprocess.run(
        ["./program", "./model.so", str(runtime)],
        cwd=library.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    found = np.array(done.stdout.split(), "float32").reshape(8, 32)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    linked = subprocess.run(["ldd", "program"], cwd=library.parent, capture_output=True, text=True)
    names = [line.split()[0] for line in linked.stdout.splitlines()]
    print("linked with:", [name for name in names if "tvm" in name or "python" in name])
    assert not any("python" in name for name in names)
    print("the same numbers from C++:", found[-1, :3])

# %% [markdown]
# ## For a GPU
#
# `compile(model, "cuda")` on a machine with a GPU stores machine code for that architecture in
# the library. Built for a device that is not there (`"nvidia_h200"` on a laptop), it stores CUDA
# source, which is compiled where it is loaded, and that needs nvcc or NVRTC there: build where
# you serve, or on the same kind of device.
#
# ## What to try
#
# - `deploy/main.cc` is a whole program: it reads the signature, takes symbolic sizes and several
#   functions, and `make` builds it. [Deploying](pages/deploying.md) says what a loader has to do.
# - Several functions: `save` writes one file, `vm["decode"]` and `vm["prefill"]` call them.
# - The size of a library is that of the weights and a few kB a kernel. Weights that should lie in
#   a file of their own are parameters of the function in place of constants.

# %%
folder.cleanup()
