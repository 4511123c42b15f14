"""AMDGPU code objects: the ELF file, its metadata note and its kernel descriptors.

Sources: LLVM "User Guide for AMDGPU Backend" (code object V5/V6, kernel descriptor, initial
    register state).
"""

import struct
from dataclasses import dataclass
from typing import Any

E_MACHINE_AMDGPU = 224
GFX950_MACH = 0x4F
NT_AMDGPU_METADATA = 32


class CodeObjectError(ValueError):
    """The bytes are not a code object this simulator can run."""


@dataclass(frozen=True)
class KernelArgument:
    """One entry of the kernel's argument segment, as the metadata note gives it."""

    offset: int
    size: int
    value_kind: str
    """"global_buffer", "by_value" or one of the "hidden_..." kinds the runtime fills."""


@dataclass(frozen=True)
class Descriptor:
    """The 64-byte kernel descriptor: what hardware sets up before the first instruction."""

    group_segment_bytes: int
    private_segment_bytes: int
    kernarg_bytes: int
    entry: int
    """Virtual address of the first instruction."""
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int

    @property
    def fp16_overflow(self) -> bool:
        """MODE.FP16_OVFL at entry: conversions to f16 and fp8 saturate."""
        return bool(self.rsrc1 >> 26 & 1)

    @property
    def ieee_mode(self) -> bool:
        """MODE.IEEE at entry: v_min and v_max quiet signaling NaN."""
        return bool(self.rsrc1 >> 23 & 1)

    @property
    def float_mode(self) -> int:
        """MODE's round and denormal bits at entry: round f32 [1:0], f64/f16 [3:2], denormals
        [5:4], [7:6]."""
        return self.rsrc1 >> 12 & 0xFF


@dataclass(frozen=True)
class Kernel:
    """One kernel of a code object: machine code, descriptor and metadata."""

    symbol: str
    code: bytes
    descriptor: Descriptor
    metadata: dict[str, Any]

    @property
    def arguments(self) -> tuple[KernelArgument, ...]:
        """The argument segment's entries, in order."""
        entries = self.metadata.get(".args", [])
        return tuple(KernelArgument(e[".offset"], e[".size"], e[".value_kind"]) for e in entries)

    @property
    def lds_bytes(self) -> int:
        """LDS of a workgroup (group_segment_fixed_size)."""
        return self.descriptor.group_segment_bytes


class CodeObject:
    """A parsed gfx950 ELF code object.

    Args:
        data: the file's bytes.

    Raises:
        CodeObjectError: if they are not an AMDGPU ELF for gfx950.
    """

    def __init__(self, data: bytes) -> None:
        self.data = bytes(data)
        if len(data) < 64 or self.data[:4] != b"\x7fELF" or self.data[4] != 2:
            raise CodeObjectError("not a 64-bit ELF file")
        (machine,) = struct.unpack_from("<H", self.data, 18)
        if machine != E_MACHINE_AMDGPU:
            raise CodeObjectError(f"ELF machine is {machine}, a code object has {E_MACHINE_AMDGPU}")
        try:
            self._read_tables()
        except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
            raise CodeObjectError(f"damaged ELF file: {error}") from error

    def _read_tables(self) -> None:
        (flags,) = struct.unpack_from("<I", self.data, 48)
        self.mach = flags & 0xFF
        if self.mach != GFX950_MACH:
            raise CodeObjectError(
                f"code object is for processor {self.mach:#x} (EF_AMDGPU_MACH), "
                f"gfx950 is {GFX950_MACH:#x}"
            )
        self._sections = self._read_sections()
        self._segments = self._read_segments()
        self.symbols = self._read_symbols()
        self.metadata = self._read_metadata()

    def _read_sections(self) -> list[tuple[int, ...]]:
        (offset,) = struct.unpack_from("<Q", self.data, 40)
        size, count = struct.unpack_from("<HH", self.data, 58)
        # name, type, flags, address, offset, size, link, info, align, entry size
        return [
            struct.unpack_from("<IIQQQQIIQQ", self.data, offset + i * size) for i in range(count)
        ]

    def _read_segments(self) -> list[tuple[int, ...]]:
        (offset,) = struct.unpack_from("<Q", self.data, 32)
        size, count = struct.unpack_from("<HH", self.data, 54)
        # type, flags, offset, virtual address, physical address, file size, memory size, align
        headers = [
            struct.unpack_from("<IIQQQQQQ", self.data, offset + i * size) for i in range(count)
        ]
        return [h for h in headers if h[0] == 1]

    def at(self, address: int, size: int) -> bytes:
        """Bytes at a virtual address of the loaded image."""
        for _, _, offset, base, _, file_size, _, _ in self._segments:
            if base <= address and address + size <= base + file_size:
                return self.data[offset + address - base : offset + address - base + size]
        raise CodeObjectError(f"address {address:#x} (+{size}) is not in a loaded segment")

    def _read_symbols(self) -> dict[str, tuple[int, int]]:
        symbols = {}
        for _, kind, _, _, offset, size, link, *_rest in self._sections:
            if kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
                continue
            names = self._sections[link][4]
            for at in range(offset, offset + size, 24):
                name, _, _, section, value, length = struct.unpack_from("<IBBHQQ", self.data, at)
                start = names + name
                text = self.data[start : self.data.index(b"\0", start)].decode()
                if text and section:
                    symbols[text] = (value, length)
        return symbols

    def _read_metadata(self) -> dict[str, Any]:
        for _, kind, _, _, offset, size, *_rest in self._sections:
            if kind != 7:  # SHT_NOTE
                continue
            at = offset
            while at + 12 <= offset + size:
                name_size, desc_size, note = struct.unpack_from("<III", self.data, at)
                desc = at + 12 + (name_size + 3 & ~3)
                if note == NT_AMDGPU_METADATA and self.data[at + 12 : at + 18] == b"AMDGPU":
                    value, _ = _unpack_messagepack(self.data[desc : desc + desc_size], 0)
                    return dict(value)
                at = desc + (desc_size + 3 & ~3)
        raise CodeObjectError("no AMDGPU metadata note")

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the kernels in the metadata."""
        return tuple(k[".name"] for k in self.metadata["amdhsa.kernels"])

    def kernel(self, symbol: str | None = None) -> Kernel:
        """One kernel by name (the only one when ``symbol`` is None).

        Raises:
            KeyError: if there is no such kernel, or ``symbol`` is None and there are several.
        """
        if symbol is None:
            if len(self.kernel_names) != 1:
                raise KeyError(f"code object has kernels {self.kernel_names}: name one")
            symbol = self.kernel_names[0]
        for metadata in self.metadata["amdhsa.kernels"]:
            if metadata[".name"] == symbol:
                break
        else:
            raise KeyError(f"no kernel {symbol!r}, there are {self.kernel_names}")
        address, _ = self.symbols[metadata[".symbol"]]
        group, private, kernarg, entry, rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack(
            "<III4xq20xIIIHH4x", self.at(address, 64)
        )
        descriptor = Descriptor(
            group, private, kernarg, address + entry, rsrc1, rsrc2, rsrc3, properties, preload
        )
        _, size = self.symbols[symbol]
        return Kernel(symbol, self.at(address + entry, size), descriptor, metadata)


def _unpack_messagepack(data: bytes, at: int) -> tuple[Any, int]:
    """Value at ``at`` and the position after it
    (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
    tag = data[at]
    at += 1
    if tag <= 0x7F:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag <= 0x8F:
        return _unpack_map(data, at, tag & 15)
    if tag <= 0x9F:
        return _unpack_list(data, at, tag & 15)
    if tag <= 0xBF:
        return data[at : at + (tag & 31)].decode(), at + (tag & 31)
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    numbers = {
        0xCC: "B",
        0xCD: "H",
        0xCE: "I",
        0xCF: "Q",
        0xD0: "b",
        0xD1: "h",
        0xD2: "i",
        0xD3: "q",
    }
    if tag in numbers:
        form = ">" + numbers[tag]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    lengths = {0xD9: "B", 0xDA: "H", 0xDB: "I", 0xDC: "H", 0xDD: "I", 0xDE: "H", 0xDF: "I"}
    if tag in lengths:
        form = ">" + lengths[tag]
        (count,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        if tag <= 0xDB:
            return data[at : at + count].decode(), at + count
        return _unpack_list(data, at, count) if tag <= 0xDD else _unpack_map(data, at, count)
    raise CodeObjectError(f"metadata note: MessagePack tag {tag:#x} is not expected in it")


def _unpack_list(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(count):
        value, at = _unpack_messagepack(data, at)
        values.append(value)
    return values, at


def _unpack_map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    flat, at = _unpack_list(data, at, 2 * count)
    return dict(zip(flat[::2], flat[1::2], strict=True)), at
