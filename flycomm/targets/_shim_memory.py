# SPDX-License-Identifier: Apache-2.0
"""The one :class:`Memory` of all targets: the C shim, told which target it serves."""

from __future__ import annotations

import ctypes

from flycomm import _shim, env
from flycomm.errors import UsageError
from flycomm.targets.base import MappedMemory, Memory

_WAYS = {1: "shm", 2: "ipc", 3: "ipc", 4: "fd"}  # enum fc_handle_kind, the first byte of a handle


class ShimMemory(Memory):
    """Memory of target ``_shim.HOST``, ``_shim.CUDA`` or ``_shim.HIP``."""

    def __init__(self, target: int):
        self._target = target
        # A GPU driver refuses to open a handle in the process that exported it.
        self.opens_own_exports = target == _shim.HOST

    def allocate(self, num_bytes: int, device: int) -> int:
        if num_bytes <= 0:
            raise UsageError(f"an allocation of {num_bytes} bytes was asked for; ask for at least 1")
        address = ctypes.c_uint64()
        sharing = _shim.SHARING[env.CUDA_SHARING.get() if self._target == _shim.CUDA else "auto"]
        _shim.check(_shim.lib().fc_alloc(self._target, device, num_bytes, sharing, ctypes.byref(address)))
        return address.value

    def free(self, address: int, device: int) -> None:
        _shim.check(_shim.lib().fc_free(self._target, device, address))

    def export(self, address: int, device: int) -> bytes:
        handle = (ctypes.c_uint8 * _shim.HANDLE_BYTES)()
        length = ctypes.c_size_t()
        _shim.check(_shim.lib().fc_export(self._target, device, address, handle, ctypes.byref(length)))
        return bytes(handle[: length.value])

    def export_done(self, address: int, device: int) -> None:
        _shim.check(_shim.lib().fc_export_done(self._target, device, address))

    def open(self, handle: bytes, device: int) -> int:
        address = ctypes.c_uint64()
        data = (ctypes.c_uint8 * len(handle)).from_buffer_copy(handle)
        _shim.check(_shim.lib().fc_open(self._target, device, data, len(handle), ctypes.byref(address)))
        return address.value

    def close(self, address: int, device: int) -> None:
        _shim.check(_shim.lib().fc_close(self._target, device, address))

    def sharing(self, device: int) -> str:
        address = self.allocate(1, device)
        try:
            return _WAYS[self.export(address, device)[0]]
        finally:
            self.free(address, device)

    def enable_peer(self, device: int, peer_device: int) -> None:
        _shim.check(_shim.lib().fc_peer_enable(self._target, device, peer_device))

    def allocate_mapped(self, num_bytes: int, device: int) -> MappedMemory:
        if num_bytes <= 0:
            raise UsageError(f"an allocation of {num_bytes} bytes was asked for; ask for at least 1")
        host, address = ctypes.c_void_p(), ctypes.c_uint64()
        _shim.check(
            _shim.lib().fc_alloc_mapped(self._target, device, num_bytes, ctypes.byref(host), ctypes.byref(address))
        )
        return MappedMemory(host.value or 0, address.value, num_bytes)

    def free_mapped(self, memory: MappedMemory, device: int) -> None:
        _shim.check(_shim.lib().fc_free_mapped(self._target, device, memory.host_address))

    def write(self, address: int, data: bytes, device: int) -> None:
        source = ctypes.c_char_p(data)  # points into `data`, which outlives the call
        source_address = ctypes.cast(source, ctypes.c_void_p).value or 0
        _shim.check(_shim.lib().fc_copy(self._target, device, address, source_address, len(data)))

    def read(self, address: int, num_bytes: int, device: int) -> bytes:
        data = bytearray(num_bytes)
        here = (ctypes.c_uint8 * num_bytes).from_buffer(data)
        _shim.check(_shim.lib().fc_copy(self._target, device, ctypes.addressof(here), address, num_bytes))
        return bytes(data)

    def fill(self, address: int, word: int, num_words: int, device: int) -> None:
        _shim.check(_shim.lib().fc_fill32(self._target, device, address, word, num_words))
