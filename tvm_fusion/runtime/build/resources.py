"""What ptxas says of a kernel: registers, spills, static shared memory, warnings, code size."""

import re
import struct
from dataclasses import dataclass, replace

from ...errors import BuildError
from .cubin_cache import compile_source
from .cuda_compiler import DeviceCode


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of one kernel.

    Attributes
    ----------
    name : str
        The kernel's name in the CUDA source.
    registers : int
        32-bit registers a thread.
    spill_bytes : int
        Bytes a thread stores to and loads from local memory for want of registers.
    smem_bytes : int
        Static shared memory a block; what a launch asks for dynamically is not in it.
    warnings : tuple of str
        ptxas' warnings and notes of lost performance, such as serialised wgmma instructions.
    code_bytes : int
        Bytes of machine code; 0 where not known.
    """

    name: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    warnings: tuple[str, ...]
    code_bytes: int = 0


def ptxas_resources(cuda_source: str, arch: str) -> tuple[KernelResources, ...]:
    """Compile a CUDA source (or find it in the cache) and return the resources of its kernels.

    Raises
    ------
    BuildError
        If the source does not compile, or there is no CUDA compiler.
    """
    return resources_of(compile_source(cuda_source, arch))


def resources_of(code: DeviceCode) -> tuple[KernelResources, ...]:
    """Return the resources of every kernel of what was compiled."""
    sizes = code_bytes(code.binary)
    kernels = parse_ptxas_log(code.log)
    return tuple(replace(k, code_bytes=sizes.get(k.name, 0)) for k in kernels)


def parse_ptxas_log(log: str) -> tuple[KernelResources, ...]:
    """Return the resources of every kernel in the output of `ptxas -v`, in its order."""
    notes = tuple(dict.fromkeys(filter(None, map(_note, log.splitlines()))))
    entries = re.split(r"Compiling entry function '(\w+)'", log)
    return tuple(
        _kernel(name, text, notes) for name, text in zip(entries[1::2], entries[2::2], strict=True)
    )


def _kernel(name: str, text: str, notes: tuple[str, ...]) -> KernelResources:
    used = re.search(r"Used (\d+) registers[^\n]*", text)
    if used is None:
        raise BuildError(
            f"ptxas reports no registers for the kernel {name}; use nvcc 12.0 or later:\n"
            f"{text.strip()}"
        )
    smem = re.search(r"(\d+) bytes smem", used[0])
    spills = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
    properties = re.search(rf"Function properties for {name}\n[^\n]*?{spills}", text)
    return KernelResources(
        name=name,
        registers=int(used[1]),
        spill_bytes=sum(map(int, properties.groups())) if properties else 0,
        smem_bytes=int(smem[1]) if smem else 0,
        warnings=tuple(n for n in notes if "function '" not in n or f"'{name}'" in n),
    )


def _note(line: str) -> str | None:
    """Return what a line warns of, or None."""
    match = re.match(r"ptxas\s+(?:warning\s*:\s*(.*)|info\s*:\s*(\(C\d+\).*))", line)
    return (match[1] or match[2]).strip() if match else None


# ---- Sizes of kernels, read from the section headers of a cubin (an ELF file, 64 bits).

_TEXT = b".text."
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr


def code_bytes(binary: bytes) -> dict[str, int]:
    """Return the bytes of machine code of each kernel in a cubin.

    Empty for what is no ELF file of 64 bits, or a damaged one.

    Notes
    -----
    A kernel's instructions stand in the section `.text.<kernel>`. The formats are those of the
    System V ABI, "ELF-64 Object File Format".
    """
    if not binary.startswith(b"\x7fELF\x02"):
        return {}
    try:
        header = _HEADER.unpack_from(binary)
        start, size, count, names = header[6], header[11], header[12], header[13]
        sections = [_SECTION.unpack_from(binary, start + i * size) for i in range(count)]
        text = binary[sections[names][4] :][: sections[names][5]]
    except (struct.error, IndexError):
        return {}
    named = ((text[s[0] :].partition(b"\0")[0], s[5]) for s in sections)
    return {n.removeprefix(_TEXT).decode(): size for n, size in named if n.startswith(_TEXT)}
