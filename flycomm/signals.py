# SPDX-License-Identifier: Apache-2.0
"""Counted signals between two ranks, and the user's part of the symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flycomm import kernels
from flycomm.channel import USER_CHANNELS
from flycomm.errors import UsageError
from flycomm.layout import Key
from flycomm.session import Session
from flycomm.validate import sized, whole
from flycomm.views import tensor_at

_KEY = Key(0, False, "signals")


class Signals:
    """``put``, ``wait`` and ``buffer`` of one session; contracts in :class:`~flycomm.communicator.Communicator`."""

    def __init__(self, session: Session):
        self._session = session

    def put(self, dst_rank: int, channel: int) -> None:
        self._launch(kernels.put_signal(self._session.world.size), dst_rank, channel)

    def wait(self, src_rank: int, channel: int) -> None:
        self._launch(kernels.wait_signal(self._session.world.size), src_rank, channel)

    def buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        channels = self._session.require_channels()
        self._session.check_rank(rank)
        shape, length = sized(sizes, dtype)
        if not whole(storage_offset):
            raise UsageError(f"storage_offset={storage_offset!r} is not a number of elements; pass a whole number")
        start = storage_offset * dtype.itemsize
        if start < 0 or start + length > channels.layout.user_bytes:
            raise UsageError(
                f"bytes {start}..{start + length} are outside the buffer of {channels.layout.user_bytes} bytes; "
                "pass a larger max_bytes to init"
            )
        address = channels.user_address(rank) + start
        return tensor_at(address, length, self._session.device).view(dtype).view(shape)

    def _launch(self, specialization: kernels.Specialization, peer: int, channel: int) -> None:
        session = self._session
        channels = session.require_channels()
        session.check_rank(peer)
        if channel not in range(USER_CHANNELS):
            raise UsageError(f"signal channel {channel!r} is not in 0..{USER_CHANNELS - 1}; use one of these")
        if peer == session.world.rank:
            raise UsageError(f"rank {peer} cannot signal itself; order work on one rank with streams and events")
        handle = session.load(specialization)
        handle(channels.peers[_KEY], channel, peer, channels.segment(_KEY, peer), session.stream())
        session.target.raise_pending()
