# SPDX-License-Identifier: Apache-2.0
"""What mono layers share on a communicator: a compiled kernel, its residency, its scratch, its launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from flycomm import targets, validate
from flycomm.communicator import Communicator
from flycomm.errors import UsageError
from flycomm.kernels import Specialization
from flycomm.residency import check_resident, resident_blocks
from flycomm.validate import whole

Given = Mapping[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]]  # name → tensor, what it must be


class LayerBase:
    """``name`` and ``build`` make the kernel; ``rows``: the most that it takes; ``scratch_bytes``: of how many blocks;
    ``slot_bytes``: of staging that it fills for each rank.

    Collective: compiles, checks residency (:class:`ResidencyError`, with the numbers), allocates the scratch. Raises
    :class:`UsageError` if the channel's slots are smaller.
    """

    def __init__(
        self,
        comm: Communicator,
        channel: str,
        name: str,
        build: Callable[..., Any],
        rows: int,
        scratch_bytes: Callable[[int], int],
        slot_bytes: int,
        threads: int,
    ):
        if not isinstance(comm, Communicator):
            raise UsageError(f"comm is a {type(comm).__name__}; pass what flycomm.init gave")
        if not whole(threads) or not 64 <= threads <= 1024 or threads % 64:
            raise UsageError(f"a block of {threads!r} threads is not whole waves; use a multiple of 64 up to 1024")
        self.comm = comm
        self.peers = comm.peers(channel)
        self._rows = rows
        blocks, room = self.peers.blocks, self.peers.capacity.value
        if room < slot_bytes:
            raise UsageError(
                f"a slot of channel {channel!r} has {room} bytes, this layer fills {slot_bytes}; pass "
                f"kernel_channels={{{channel!r}: ({blocks}, {slot_bytes})}} to init, slot_bytes() of the largest layer"
            )
        fixed = Specialization(name, build, comm.world_size, "bf16", blocks, threads, 256)
        self.kernel = comm._session.load(fixed)
        target, device = targets.active(), comm.device.index or 0
        self.scratch = torch.zeros(scratch_bytes(blocks), dtype=torch.uint8, device=comm.device)
        target.runtime.synchronize(device)
        ranks = comm._session.ranks_on_device()  # all come here: nobody waits in a kernel while another synchronises
        check_resident(name, blocks, ranks, resident_blocks(self.kernel, target, device))
        comm._session.layers.add(self)

    def reset(self) -> None:
        """Forget all marks, with no launch in flight. ``comm.recover()`` does it, as epochs begin anew."""
        self.scratch.zero_()

    def _enter(self, rows: int) -> None:
        """Before a call: raise what an earlier wait left, and for a number of rows that the layer does not take."""
        self.comm.check()
        if not 1 <= rows <= self._rows:
            raise UsageError(
                f"{rows} rows are not in 1..{self._rows}; make a layer of a larger class, or split the batch"
            )

    def _launch(self, given: Given, made: tuple[torch.Tensor, ...], rows: int, eps: float) -> None:
        """Check what was ``given`` and launch on torch's current stream: inputs, results, scratch, in this order."""
        for name, (tensor, shape, dtype) in given.items():
            check_tensor(name, tensor, shape, dtype, self.comm.device)
        if not isinstance(eps, float | int) or not eps >= 0:
            raise UsageError(f"eps={eps!r} is not a number of at least 0; pass for example 1e-6")
        addresses = [tensor.data_ptr() for tensor in (*(one for one, _, _ in given.values()), *made, self.scratch)]
        self.kernel(self.peers, 0, *addresses, rows, eps, self.comm.stream())
        targets.active().raise_pending()


def check_shape(layer: Any, kind: type[Any]) -> None:
    """Raise :class:`UsageError` for what is no ``Layer`` of the kernel's module, or has no whole numbers."""
    if not isinstance(layer, kind):
        raise UsageError(f"{layer!r} is not a {kind.__module__}.Layer; pass one")
    numbers = {one.name: getattr(layer, one.name) for one in fields(kind) if one.type is int}
    if not whole(*numbers.values()):
        raise UsageError(f"{layer!r} has what is no whole number; {', '.join(numbers)} are counts")


def rows_of(x: torch.Tensor) -> int:
    """The token rows of ``x`` (rows, …)."""
    validate.check_tensor("x", x)
    if x.dim() != 2:
        raise UsageError(f"x is {tuple(x.shape)}; pass (rows, elements of a row), also for one row")
    return x.shape[0]


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise :class:`UsageError` for what a kernel could not read."""
    validate.check_tensor(name, tensor)
    fits = tensor.shape == shape and tensor.dtype == dtype and tensor.device == device
    if not fits or not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise UsageError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; pass {shape} {dtype} on {device}, "
            "contiguous and 16-byte aligned"
        )
