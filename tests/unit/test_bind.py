# SPDX-License-Identifier: Apache-2.0
"""Binding a launch when FlyDSL is not as we know it, or only the handle may launch. No kernel is compiled."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from flycomm.errors import TargetError, UsageError
from flycomm.kernels import bind


def _value(given, cell):
    cell.value = given


class Handle:
    """A launch handle as FlyDSL makes them, for an address, a count, a stream and two integers; notes its calls."""

    def __init__(self, traced=False, fill=_value):
        self.called = []
        self.seen = []
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._launched)
        self._keepalive = SimpleNamespace(_ktrace_traced=traced, _get_func_exe=lambda: self._function)
        types = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
        self._call_spec = [(position, one, _value if position else fill) for position, one in enumerate(types)]
        self._call_state = None

    def _launched(self, packed):
        cells = (ctypes.c_void_p * 5).from_address(packed)
        types = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32)
        self.seen.append(tuple(kind.from_address(cell).value for kind, cell in zip(types, cells, strict=True)))

    def __call__(self, *arguments):
        self.called.append(arguments)


def test_what_the_launcher_is_given():
    handle = Handle()
    bound = bind(handle, (1 << 40, None, None, None, None), (4, 2, 1, 3))
    bound(1, 1 << 63, -(1 << 31), 2)
    bound(3, 0, (1 << 31) - 1, 4)
    assert handle.seen == [(1 << 40, -(1 << 31), 1 << 63, 2, 1), (1 << 40, (1 << 31) - 1, 0, 4, 3)]
    assert handle.called == []


def test_each_has_storage_of_its_own():
    handle = Handle()
    one, two = (bind(handle, (address, None, 0, 0, 0), (1,)) for address in (10, 20))
    one(1)
    two(2)
    one(3)
    assert [seen[:2] for seen in handle.seen] == [(10, 1), (20, 2), (10, 3)]


def test_a_handle_that_has_been_called_keeps_its_slots_elsewhere():
    handle = Handle()
    handle._call_state, handle._call_spec = SimpleNamespace(_spec=handle._call_spec), None
    bind(handle, (5, None, 0, 0, 0), (1,))(6)
    assert handle.seen == [(5, 6, 0, 0, 0)]


def test_a_traced_kernel_is_launched_by_its_handle():
    handle = Handle(traced=True)
    bound = bind(handle, (5, None, None, 0, 0), (2, 1))
    bound(7, 8)
    assert (handle.called, handle.seen) == ([(5, 8, 7, 0, 0)], [])
    with pytest.raises(UsageError, match="not the 2 values"):
        bound(7)


def test_a_slot_that_nothing_fills_stays_empty():
    handle = Handle()
    handle._call_spec[2] = (-1, ctypes.c_void_p, None)
    bind(handle, (5, None, None, 0, 0), (1,))(6)
    assert handle.seen == [(5, 6, 0, 0, 0)]
    with pytest.raises(UsageError, match="argument -1 is passed as nothing"):
        bind(handle, (5, None, None, 0, 0), (-1,))


@pytest.mark.parametrize("missing", ["_keepalive", "_call_spec"])
def test_a_flydsl_that_names_things_otherwise(missing):
    handle = Handle()
    delattr(handle, missing)
    with pytest.raises(TargetError, match=r"flydsl .* another way"):
        bind(handle, (5, None, 0, 0, 0), (1,))


@pytest.mark.parametrize("slots", [[], [(0, ctypes.c_void_p)], [(0, ctypes.c_void_p, _value, "more")]])
def test_a_flydsl_that_describes_slots_otherwise(slots):
    handle = Handle()
    handle._call_spec, handle._call_state = slots, SimpleNamespace(_spec=[])
    with pytest.raises(TargetError, match="another way"):
        bind(handle, (5,), ())


def test_a_flydsl_that_passes_something_else_than_the_value():
    handle = Handle(fill=lambda given, cell: _value(given + 1, cell))
    bind(handle, (5, None, 0, 0, 0), (1,))(6)
    assert handle.seen == [(6, 6, 0, 0, 0)]  # a fixed argument is packed as FlyDSL says
    with pytest.raises(TargetError, match="another way"):
        bind(handle, (None, 1, 0, 0, 0), (0,))
