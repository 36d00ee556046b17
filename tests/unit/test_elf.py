# SPDX-License-Identifier: Apache-2.0
"""Reading AMD code objects: the MessagePack subset, and bytes that are not what they should be."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flycomm.compile import _elf


def _pack(value: Any, wide: bool = False) -> bytes:
    """MessagePack, in the shortest form or the widest."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        if 0 <= value <= 0x7F and not wide:
            return bytes([value])
        if -32 <= value < 0 and not wide:
            return struct.pack("b", value)
        forms = [(0xD3, ">q")] if wide and value < 2**63 else list(_elf._MSGPACK_INTS.items())
        for head, layout in forms:
            try:
                return bytes([head]) + struct.pack(layout, value)
            except struct.error:
                continue
    if isinstance(value, str):
        raw = value.encode()
        if len(raw) < 32 and not wide:
            return bytes([0xA0 | len(raw)]) + raw
        return b"\xdb" + struct.pack(">I", len(raw)) + raw
    if isinstance(value, list):
        head = bytes([0x90 | len(value)]) if len(value) < 16 and not wide else b"\xdd" + struct.pack(">I", len(value))
        return head + b"".join(_pack(one, wide) for one in value)
    head = bytes([0x80 | len(value)]) if len(value) < 16 and not wide else b"\xdf" + struct.pack(">I", len(value))
    return head + b"".join(_pack(key, wide) + _pack(one, wide) for key, one in value.items())


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
    max_leaves=25,
)


@given(_VALUES, st.booleans())
def test_msgpack_round_trip(value: Any, wide: bool):
    assert _elf.unpack_msgpack(_pack(value, wide)) == value


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\xca\0\0\0\0", b"\xa5ab", b"\x92\x01", b"\xcd\x01", b"\x01\x02", b"\xd9"]
)
def test_broken_msgpack_is_a_value_error(data: bytes):
    with pytest.raises(ValueError, match=r"MessagePack"):
        _elf.unpack_msgpack(data)


def _code_object(metadata: Any) -> bytes:
    """The smallest file that :func:`_elf.parse` accepts: symbols, a descriptor, and a note."""
    names = b"\0k\0k.kd\0"
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    symbols += struct.pack("<IBBHQQ", 1, 0x12, 0, 4, 0x1100, 12)
    symbols += struct.pack("<IBBHQQ", 3, 0x11, 0, 4, 0x1040, 64)
    payload = _pack(metadata)
    note = struct.pack("<III", 7, len(payload), 32) + b"AMDGPU\0\0" + payload + bytes(-len(payload) % 4)
    body = bytes(0x40) + struct.pack("<4Iq", 0, 0, 0, 0, 0xC0) + bytes(0x100)
    parts = [(3, 0, names, 0), (2, 0, symbols, 1), (7, 0, note, 0), (1, 0x1000, body, 0)]
    data, table = bytes(64), struct.pack("<IIQQQQIIQQ", *[0] * 10)
    for kind, address, content, link in parts:
        table += struct.pack("<IIQQQQIIQQ", 0, kind, 0, address, len(data), len(content), link, 0, 1, 0)
        data += content
    header = struct.pack(
        "<4s5B7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 64, 4, 3, 224, 1, 0, 0, len(data), 0, 64, 0, 0, 64, 5, 0
    )
    return header + data[64:] + table


_METADATA = {"amdhsa.kernels": [{".name": "k"}], "amdhsa.target": "amdgcn-amd-amdhsa--gfx950"}


def test_parse():
    code = _elf.parse(_code_object(_METADATA))
    assert (code.machine, code.os_abi, code.abi_version, code.file_type) == (224, 64, 4, 3)
    assert code.symbols["k"] == _elf.Symbol("k", 4, 0x1100, 12)
    assert code.entries == {"k": 0x1100}
    assert code.kernels == [{".name": "k"}]
    assert code.arch == "gfx950"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "damaged"),
        (b"MZ" + bytes(200), "not a little-endian ELF64"),
        (_code_object(_METADATA).replace(b"AMDGPU\0", b"NVIDIA\0"), "no AMDGPU metadata note"),
        (_code_object({"amdhsa.version": [1, 2]}), "lists no kernels"),
        (_code_object(_METADATA)[:-1], "section table"),
    ],
)
def test_what_is_no_code_object_is_a_value_error(data: bytes, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        _elf.parse(data)


@given(st.integers(0, len(_code_object(_METADATA)) - 1), st.integers(0, 255))
def test_one_wrong_byte_is_read_or_is_a_value_error(at: int, byte: int):
    data = bytearray(_code_object(_METADATA))
    data[at] = byte
    with contextlib.suppress(ValueError):
        _elf.parse(bytes(data))
