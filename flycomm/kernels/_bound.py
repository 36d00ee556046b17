# SPDX-License-Identifier: Apache-2.0
"""``bind``: a launch whose arguments are packed once, but for a few.

A launch handle packs every argument at every call, the ``Peers`` of eight ranks alone in thirteen slots. A communicator
launches the same kernel on the same channel again and again: only addresses, counts and the stream differ.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from flycomm.errors import UsageError
from flycomm.kernels import _flydsl
from flycomm.kernels._specialization import Specialization, compiled

Bound = Callable[..., None]
"""``bound(*values)`` launches; ``values`` are those of the varying arguments, in the order that ``bind`` was told."""

_CELL = 8  # bytes of storage for a varying argument of any type
_VARYING = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64)


def bind(kernel: Any, arguments: Sequence[Any], varying: Sequence[int]) -> Bound:
    """Fix the ``arguments`` of a launch, except those at the positions ``varying``.

    ``kernel``: a launch handle, or a :class:`Specialization`, which is compiled. ``arguments``: all of the kernel's, as
    its handle takes them; what stands at the positions ``varying`` is not used (None will do). What varies is an
    address, a 32- or 64-bit integer or a raw stream handle, each passed as a plain int.

    A call writes the values into storage of this ``Bound`` and launches: one thread at a time may use it, and other
    threads may use others of the same kernel. It keeps the kernel alive, but not the memory that addresses point to,
    those in a ``Peers`` included. The GIL is released while the launcher runs: on the host target that is the whole
    kernel, which may wait for another thread's. It may be captured where the handle may. Of the launch it raises what
    the handle does, nothing: ask ``Target.raise_pending``. Costs half a microsecond beside the launcher.

    Raises :class:`UsageError` for positions or types that cannot vary, and at a call for a wrong number of values or
    one that its type cannot hold; :class:`TargetError` if this version of FlyDSL keeps its launches another way.
    """
    handle = compiled(kernel) if isinstance(kernel, Specialization) else kernel
    slots, entry = _flydsl.launcher(handle)
    types = _types(slots, len(arguments), varying)
    if entry is None:
        return _through(handle, arguments, varying)
    cells = ctypes.create_string_buffer(_CELL * max(1, len(types)))
    storage = [_stored(slot, arguments, varying, cells) for slot in slots]
    packed = (ctypes.c_void_p * len(slots))(*map(ctypes.addressof, storage))
    launch: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)  # releases the GIL
    launch.keep = handle, storage, packed
    address = ctypes.c_void_p(ctypes.addressof(packed))
    letters = [ctype._type_ for ctype in types]  # ctypes and struct name C types by the same letters
    pack = struct.Struct("@" + "".join(f"{one}{_CELL - struct.calcsize(one)}x" for one in letters)).pack_into

    def bound(*values: int) -> None:
        try:
            pack(cells, 0, *values)
        except (struct.error, OverflowError) as error:
            raise UsageError(f"{values} are not what varies in this launch ({error}); pass an int for each") from None
        launch(address)

    return bound


def _types(slots: Sequence[_flydsl.Slot], count: int, varying: Sequence[int]) -> list[Any]:
    """The C types of what varies."""
    if count <= max(position for position, _, _ in slots):
        raise UsageError(f"{count} arguments are fewer than this kernel takes; pass all of them")
    if len(set(varying)) != len(varying):
        raise UsageError(f"positions {tuple(varying)} have one twice; name each varying argument once")
    return [_type_at(slots, position) for position in varying]


def _type_at(slots: Sequence[_flydsl.Slot], position: int) -> Any:
    found = [(ctype, fill) for at, ctype, fill in slots if at == position and fill is not None]
    if len(found) != 1 or found[0][0] not in _VARYING:
        names = ", ".join(ctype.__name__ for ctype, _ in found) or "nothing"
        raise UsageError(
            f"argument {position} is passed as {names} and cannot vary; only addresses, 32- and 64-bit integers and "
            "streams can"
        )
    ctype, fill = found[0]
    probe = ctype()
    fill(_CELL, probe)
    if probe.value != _CELL:
        raise _flydsl.unknown()
    return ctype


def _stored(slot: _flydsl.Slot, arguments: Sequence[Any], varying: Sequence[int], cells: Any) -> Any:
    position, ctype, fill = slot
    if position in varying:
        return ctype.from_buffer(cells, _CELL * varying.index(position))
    value = ctype()
    if fill is not None:  # a launcher without a stream has a slot for none
        fill(arguments[position], value)
    return value


def _through(handle: Any, arguments: Sequence[Any], varying: Sequence[int]) -> Bound:
    """The same by an ordinary call of the handle."""

    def bound(*values: int) -> None:
        if len(values) != len(varying):
            raise UsageError(
                f"{values} are not the {len(varying)} values that vary in this launch; pass an int for each"
            )
        given = dict(zip(varying, values, strict=True))
        handle(*(given.get(position, fixed) for position, fixed in enumerate(arguments)))

    return bound
