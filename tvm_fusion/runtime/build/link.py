"""The last step of a build: bytecode, kernels, constants and external libraries in one."""

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax
from tvm.relax import vm_build

from ...errors import BuildError


def link(
    builder: relax.ExecBuilder,
    target: tvm.target.Target,
    library: tvm.runtime.Module | None,
    attrs: Mapping[str, Any] | None,
) -> relax.VMExecutable:
    """Join bytecode, kernels, constants and external libraries, as `tvm.relax.build` does."""
    attrs = dict(attrs or {})
    external = list(attrs.get("external_mods", []))
    for module in filter(vm_build._is_device_module, external):
        if library is None:
            raise BuildError("external device modules without a PrimFunc that calls them")
        library.import_module(module)
    hosts = [module for module in external if not vm_build._is_device_module(module)]
    params = dict(attrs.get("const_name_to_constant", {}))
    linked = vm_build._ffi_api.VMLink(builder, target, library, hosts, params)
    return relax.VMExecutable(linked)
