"""Sizes of kernels, read from the section headers of a cubin (an ELF file, 64 bits)."""

import struct

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
