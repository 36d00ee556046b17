# SPDX-License-Identifier: Apache-2.0
"""AMD GPU code objects, read in plain Python: the ELF header, symbols, and the metadata note.

The layout is LLVM's "User Guide for AMDGPU Backend", code object v6. Malformed bytes raise ``ValueError``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

EM_AMDGPU = 224
OSABI_HSA = 64
ABI_V6 = 4  # the value that EI_ABIVERSION has in code object v6
ET_DYN = 3
NT_AMDGPU_METADATA = 32
DESCRIPTOR_BYTES = 64  # of a kernel descriptor, the symbol "<kernel>.kd"

_HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE = struct.Struct("<III")
_SHT_SYMTAB, _SHT_DYNSYM, _SHT_NOTE = 2, 11, 7
_DESCRIPTOR_ENTRY = 16  # offset of the i64 from the descriptor to the kernel's first instruction


@dataclass(frozen=True)
class Symbol:
    name: str
    section: int  # 0: undefined
    address: int
    num_bytes: int


@dataclass(frozen=True)
class CodeObject:
    """One parsed code object; ``metadata`` is the note's map as the compiler wrote it."""

    machine: int
    file_type: int
    os_abi: int
    abi_version: int
    symbols: dict[str, Symbol]
    metadata: dict[str, Any]
    entries: dict[str, int]  # address of each kernel's first instruction, as its descriptor says

    @property
    def kernels(self) -> list[dict[str, Any]]:
        return self.metadata["amdhsa.kernels"]

    @property
    def arch(self) -> str:
        """``"gfx950"``, or with features ``"gfx950:xnack-"``."""
        return self.metadata["amdhsa.target"].rpartition("-")[2] if "amdhsa.target" in self.metadata else ""


@dataclass(frozen=True)
class _Section:
    kind: int
    address: int
    offset: int
    num_bytes: int
    link: int

    def cut(self, data: bytes) -> bytes:
        if self.offset + self.num_bytes > len(data):
            raise ValueError("an ELF section ends after the file")
        return data[self.offset : self.offset + self.num_bytes]


def parse(data: bytes) -> CodeObject:
    """Parse a linked code object. Raises ``ValueError`` if it is not a little-endian ELF64 with a metadata note."""
    try:
        return _parse(data)
    except (struct.error, LookupError, TypeError) as damage:
        raise ValueError(f"the ELF file is damaged ({damage})") from damage


def _parse(data: bytes) -> CodeObject:
    fields = _HEADER.unpack_from(data)
    magic, bits, order, _, os_abi, abi_version, file_type, machine = fields[:8]
    if magic != b"\x7fELF" or bits != 2 or order != 1:
        raise ValueError("not a little-endian ELF64 file")
    table, entry_bytes, count = fields[11], fields[16], fields[17]
    if entry_bytes != _SECTION.size or table + count * entry_bytes > len(data):
        raise ValueError("the ELF section table is damaged")
    sections = []
    for index in range(count):
        _, kind, _, address, offset, num_bytes, link, *_ = _SECTION.unpack_from(data, table + index * entry_bytes)
        sections.append(_Section(kind, address, offset, num_bytes, link))
    symbols = {symbol.name: symbol for symbol in _symbols(data, sections)}
    entries = {
        name.removesuffix(".kd"): symbol.address + _entry_distance(data, sections[symbol.section], symbol)
        for name, symbol in symbols.items()
        if name.endswith(".kd") and symbol.section
    }
    return CodeObject(machine, file_type, os_abi, abi_version, symbols, _metadata(data, sections), entries)


def _symbols(data: bytes, sections: list[_Section]) -> Iterator[Symbol]:
    for table in sections:
        if table.kind not in (_SHT_SYMTAB, _SHT_DYNSYM):
            continue
        names = sections[table.link].cut(data)
        for name, _, _, section, address, num_bytes in _SYMBOL.iter_unpack(table.cut(data)):
            end = names.find(b"\0", name)
            if name and section < len(sections):  # larger numbers are absolute symbols
                yield Symbol(names[name:end].decode(), section, address, num_bytes)


def _entry_distance(data: bytes, section: _Section, symbol: Symbol) -> int:
    body, at = section.cut(data), symbol.address - section.address
    if not 0 <= at <= len(body) - DESCRIPTOR_BYTES:
        raise ValueError(f"the kernel descriptor {symbol.name} lies outside its section")
    return struct.unpack_from("<q", body, at + _DESCRIPTOR_ENTRY)[0]


def _metadata(data: bytes, sections: list[_Section]) -> dict[str, Any]:
    for section in sections:
        if section.kind != _SHT_NOTE:
            continue
        body, at = section.cut(data), 0
        while at + _NOTE.size <= len(body):
            name_bytes, payload_bytes, kind = _NOTE.unpack_from(body, at)
            name_at = at + _NOTE.size
            payload_at = name_at + -(-name_bytes // 4) * 4
            if kind == NT_AMDGPU_METADATA and body[name_at : name_at + name_bytes] == b"AMDGPU\0":
                found = unpack_msgpack(body[payload_at : payload_at + payload_bytes])
                if isinstance(found, dict) and "amdhsa.kernels" in found:
                    return found
                raise ValueError("the AMDGPU metadata note lists no kernels")
            at = payload_at + -(-payload_bytes // 4) * 4
    raise ValueError("the ELF file has no AMDGPU metadata note")


def unpack_msgpack(data: bytes) -> Any:
    """Decode one MessagePack value of the kinds that LLVM writes: nil, bool, int, str, array, map."""
    value, end = _unpack(data, 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes after the end of a MessagePack value")
    return value


_MSGPACK_INTS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_MSGPACK_SIZES = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    if at >= len(data):
        raise ValueError("a MessagePack value ends too early")
    head = data[at]
    at += 1
    if head <= 0x7F:
        return head, at
    if head >= 0xE0:
        return head - 0x100, at
    if head in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[head], at
    if head in _MSGPACK_INTS:
        return _number(data, at, _MSGPACK_INTS[head])
    if head in _MSGPACK_SIZES:
        size, at = _number(data, at, _MSGPACK_SIZES[head])
    elif head <= 0xBF:
        size = head & (0x1F if head >= 0xA0 else 0x0F)
    else:
        raise ValueError(f"MessagePack type 0x{head:02x} is not one that code objects use")
    if 0xA0 <= head <= 0xBF or 0xD9 <= head <= 0xDB:
        if at + size > len(data):
            raise ValueError("a MessagePack string ends too early")
        return data[at : at + size].decode(), at + size
    is_map = head <= 0x8F or head >= 0xDE
    values = []
    for _ in range(size * 2 if is_map else size):
        value, at = _unpack(data, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if is_map else values), at


def _number(data: bytes, at: int, layout: str) -> tuple[int, int]:
    size = struct.calcsize(layout)
    if at + size > len(data):
        raise ValueError("a MessagePack number ends too early")
    return struct.unpack_from(layout, data, at)[0], at + size
