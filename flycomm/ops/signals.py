# SPDX-License-Identifier: Apache-2.0
"""Barrier and signals as ops. Eager only: no tensor orders them, so they have no fakes."""

from __future__ import annotations

from flycomm.ops._library import op
from flycomm.ops.registry import lookup


@op("barrier(str group_name) -> ()")
def barrier(group_name: str) -> None:
    lookup(group_name).barrier()


@op("put_signal(int dst_rank, int channel, str group_name) -> ()")
def put_signal(dst_rank: int, channel: int, group_name: str) -> None:
    lookup(group_name).put_signal(dst_rank, channel)


@op("wait_signal(int src_rank, int channel, str group_name) -> ()")
def wait_signal(src_rank: int, channel: int, group_name: str) -> None:
    lookup(group_name).wait_signal(src_rank, channel)
