# SPDX-License-Identifier: Apache-2.0
"""A world over MPI, by mpi4py."""

from __future__ import annotations

import itertools
import struct
from typing import Any

from flycomm.errors import CommError, UsageError
from flycomm.world._base import Device, World


class MpiWorld(World):
    """The ranks of an mpi4py communicator; see :meth:`World.from_mpi`."""

    def __init__(self, comm: Any, device: Device):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there and finds no MPI library
            raise UsageError(
                f"mpi4py cannot be imported ({error}); install flycomm[mpi], or start the ranks with torchrun"
            ) from error
        self._mpi = MPI
        comm = comm if comm is not None else MPI.COMM_WORLD
        # A duplicate: messages of ours cannot meet the caller's.
        self._comm = comm.Dup()
        neighbours = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        local_rank = neighbours.Get_rank()
        neighbours.Free()
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), device, local_rank)

    def _gather(self, payload: bytes) -> list[bytes]:
        byte = self._mpi.BYTE
        try:
            packed = bytearray(8 * self.size)
            self._comm.Allgather([struct.pack("<q", len(payload)), byte], [packed, byte])
            lengths = struct.unpack(f"<{self.size}q", packed)
            starts = [0, *itertools.accumulate(lengths)]
            received = bytearray(starts[-1])
            self._comm.Allgatherv([payload, byte], [received, (lengths, starts[:-1]), byte])
        except self._mpi.Exception as error:
            raise CommError(
                f"rank {self.rank} of {self.size} could not exchange bytes over MPI: {error}; "
                "look at the other ranks: one of them may have ended"
            ) from error
        return [bytes(received[start : start + length]) for start, length in zip(starts, lengths, strict=False)]

    def close(self) -> None:
        if not self._closed and not self._mpi.Is_finalized():
            self._comm.Free()
        super().close()
