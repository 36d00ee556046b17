# SPDX-License-Identifier: Apache-2.0
"""``SymmetricTensor``: a tensor of memory that every rank has and every rank can read, with its own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flycomm.collectives import Collectives
from flycomm.errors import ClosedError, UsageError
from flycomm.memory import SymmetricBuffer
from flycomm.session import Session
from flycomm.validate import check_apart, check_like, sized
from flycomm.views import tensor_at


class SymmetricTensor:
    """Made by :meth:`Communicator.empty`, on all ranks alike. ``tensor`` is this rank's own memory, uninitialised.

    Its collectives copy nothing: they read the peers' memory in place, between barriers of their own. What a stream
    wrote to ``tensor`` before such a call, the peers' calls see; after the call, it may be written again.
    """

    def __init__(self, session: Session, collectives: Collectives, shape: Sequence[int], dtype: torch.dtype):
        session.require_channels()
        shape, num_bytes = sized(shape, dtype)
        if not num_bytes:
            raise UsageError(f"a symmetric tensor of shape {shape} has no elements; give it at least one")
        self._session = session
        self._collectives = collectives
        self._buffer = SymmetricBuffer(session.world, session.target, num_bytes, name=f"empty {shape} {dtype}")
        addresses = self._buffer.addresses
        self._tensors = [tensor_at(address, num_bytes, session.device).view(dtype).view(shape) for address in addresses]
        rank, size = session.world.rank, session.world.size
        self._rotated = tuple(addresses[(rank + j) % size] for j in range(size))
        self._closed = False

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's memory. Must not be used after :meth:`close`."""
        return self.peer(self._session.world.rank)

    def peer(self, rank: int) -> torch.Tensor:
        """Rank ``rank``'s memory; the caller orders its use, with signals or a barrier."""
        self._check_open()
        self._session.check_rank(rank)
        return self._tensors[rank]

    def all_reduce(self, op: str = "sum", out: torch.Tensor | None = None, channel: int = 0) -> torch.Tensor:
        """Every rank's tensor reduced by ``op`` into a new tensor, or ``out`` (same shape and dtype, elsewhere).

        The dtypes, operations and bits of :meth:`Communicator.all_reduce`.
        """
        x = self.tensor
        if out is not None:
            check_like(x, out, x.shape)
            check_apart(x, out)
        return self._collectives.all_reduce_symmetric(x, self._rotated, op, out, False, channel)

    def all_reduce_(self, op: str = "sum", channel: int = 0) -> torch.Tensor:
        """:meth:`all_reduce` into ``tensor`` itself, of all ranks; returns ``tensor``.

        If the call gives up, ``tensor`` is part input, part result: a peer that is late may still read it.
        """
        return self._collectives.all_reduce_symmetric(self.tensor, self._rotated, op, None, True, channel)

    def close(self) -> None:
        """Collective: wait for this rank's kernels, then for all ranks, then unmap and free. Safe to call again."""
        if not self._closed:
            self._closed = True
            self._tensors = []
            self._buffer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the symmetric tensor is closed; make another with Communicator.empty")

    def __repr__(self) -> str:
        state: Any = "closed" if self._closed else f"{tuple(self.tensor.shape)}, {self.tensor.dtype}"
        return f"SymmetricTensor({state})"
