# SPDX-License-Identifier: Apache-2.0
"""The C shim by ctypes: ``csrc_shim/flycomm_shim.h`` says what each function does.

``lib()`` loads the library once; ``check(code)`` turns its return values into :class:`TargetError`. Calls release the
interpreter lock.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char, c_char_p, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from flycomm import env
from flycomm.errors import TargetError

HOST, CUDA, HIP = 0, 1, 2  # enum fc_target
HANDLE_BYTES = 128
SHARING = {"auto": 0, "ipc": 1, "fd": 2}  # enum fc_sharing
_VERSION = "2"  # FC_VERSION of the header that this file was written for
_REBUILD = "build it with `make` or `pip install .`"


class DeviceInfo(ctypes.Structure):
    """``fc_device_info``."""

    _fields_ = (
        ("name", c_char * 128),
        ("arch", c_char * 32),
        ("warp_size", c_uint32),
        ("compute_units", c_uint32),
        ("memory_bytes", c_uint64),
        ("clock_hz", c_uint64),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "fc_driver_open": (c_int,),
    "fc_device_count": (c_int, POINTER(c_int)),
    "fc_device_query": (c_int, c_int, POINTER(DeviceInfo)),
    "fc_synchronize": (c_int, c_int),
    "fc_alloc": (c_int, c_int, c_size_t, c_int, POINTER(c_uint64)),
    "fc_free": (c_int, c_int, c_uint64),
    "fc_export": (c_int, c_int, c_uint64, POINTER(c_uint8), POINTER(c_size_t)),
    "fc_export_done": (c_int, c_int, c_uint64),
    "fc_open": (c_int, c_int, POINTER(c_uint8), c_size_t, POINTER(c_uint64)),
    "fc_close": (c_int, c_int, c_uint64),
    "fc_peer_enable": (c_int, c_int, c_int),
    "fc_alloc_mapped": (c_int, c_int, c_size_t, POINTER(c_void_p), POINTER(c_uint64)),
    "fc_free_mapped": (c_int, c_int, c_void_p),
    "fc_copy": (c_int, c_int, c_uint64, c_uint64, c_size_t),
    "fc_fill32": (c_int, c_int, c_uint64, c_uint32, c_size_t),
    "fc_cuda_preload": (c_int,),
    "fc_cuda_start_early": (c_bool,),
    "fc_cuda_take_error": (),
    "fc_host_set_order": (c_int32,),
    "fc_host_set_threads": (c_int32,),
    "fc_host_set_weak_seed": (c_uint64,),
    "fc_host_take_error": (),
}
_RESULTS: dict[str, Any] = {  # of those that do not return an error code
    "fc_cuda_start_early": None,
    "fc_cuda_take_error": c_char_p,
    "fc_host_set_order": None,
    "fc_host_set_threads": None,
    "fc_host_set_weak_seed": None,
    "fc_host_take_error": c_char_p,
}


def path() -> Path:
    """Where the library is looked for: ``FLYCOMM_SHIM``, or beside this file."""
    return Path(env.SHIM.get() or Path(__file__).with_name("libflycomm_shim.so")).absolute()


@cache
def lib() -> ctypes.CDLL:
    """The library, loaded once. Raises :class:`TargetError` when it is missing or of another version."""
    where = path()
    if not where.exists():
        raise TargetError(f"flycomm's C library is not at {where}; {_REBUILD}")
    try:
        library = ctypes.CDLL(str(where))
        library.fc_version.restype = library.fc_last_error.restype = c_char_p
        version = library.fc_version().decode()
        if version != _VERSION:
            raise TargetError(f"{where} has interface {version} and this flycomm needs {_VERSION}; {_REBUILD}")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _RESULTS.get(name, c_int)
    except (OSError, AttributeError) as error:
        raise TargetError(f"{where} cannot be used ({error}); {_REBUILD}") from error
    return library


def check(code: int) -> None:
    """Raise :class:`TargetError` with the library's own sentence if ``code`` is not 0. Call it on the same thread."""
    if code != 0:
        raise TargetError(lib().fc_last_error().decode(errors="replace"))


def open_driver(target: int) -> None:
    """Open a target's driver; safe to call again. The error says what was looked for."""
    check(lib().fc_driver_open(target))


def device_count(target: int) -> int:
    count = c_int()
    check(lib().fc_device_count(target, ctypes.byref(count)))
    return count.value


def device_query(target: int, device: int) -> dict[str, Any]:
    """The fields of :class:`flycomm.targets.Capabilities` that a driver knows (all but ``graphs``)."""
    info = DeviceInfo()
    check(lib().fc_device_query(target, device, ctypes.byref(info)))
    return {
        "device_name": info.name.decode(errors="replace"),
        "arch": info.arch.decode(),
        "warp_size": info.warp_size,
        "compute_units": info.compute_units,
        "memory_bytes": info.memory_bytes,
        "clock_hz": info.clock_hz,
    }


def synchronize(target: int, device: int) -> None:
    """Wait for everything on the device."""
    check(lib().fc_synchronize(target, device))
