# SPDX-License-Identifier: Apache-2.0
"""One algorithm a file, built from primitives; and :data:`SHIPPED`, every specialization that dispatch may choose.

Tests compile all of it, ``python -m flycomm compile`` writes it out. A kernel of your own becomes a launch handle the
same way: ``compiled(Specialization(name, build, world, dtype, blocks, threads))``, with ``null_pointer`` and
``peers_placeholder`` among the arguments that compile it (``examples/02_in_kernel.py``).
"""

from __future__ import annotations

from flycomm.channel import MAX_WORLD
from flycomm.dtypes import REDUCIBLE
from flycomm.geometry import SYNC, TABLES, Geometry
from flycomm.kernels import all_reduce_one_shot, barrier, point_to_point
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._specialization import Specialization, compiled

_ALL_REDUCE = {
    "flags": ("all_reduce_one_shot", all_reduce_one_shot.build_flags),
    "packets": ("all_reduce_packets", all_reduce_one_shot.build_packets),
    "sentinel": ("all_reduce_sentinel", all_reduce_one_shot.build_sentinel),
}


def all_reduce(world: int, dtype: str, geometry: Geometry, protocol: str = "flags") -> Specialization:
    """One-shot all-reduce by one of ``geometry.PROTOCOLS``."""
    name, build = _ALL_REDUCE[protocol]
    return Specialization(name, build, world, dtype, geometry.blocks, geometry.threads)


def rank_barrier(world: int) -> Specialization:
    return Specialization("barrier", barrier.build, world, "", SYNC.blocks, SYNC.threads)


def put_signal(world: int) -> Specialization:
    return Specialization("put_signal", point_to_point.build_put_signal, world, "", SYNC.blocks, SYNC.threads)


def wait_signal(world: int) -> Specialization:
    return Specialization("wait_signal", point_to_point.build_wait_signal, world, "", SYNC.blocks, SYNC.threads)


# flags at every grid, since a communicator may be told to use nothing else; the rest where a table chooses it
_GPU_CHOICES = sorted(
    {
        (entry.geometry, protocol)
        for target in ("cuda", "rocm")
        for entry in TABLES[target]
        for protocol in ("flags", entry.protocol)
    },
    key=str,
)

SHIPPED: tuple[Specialization, ...] = tuple(
    specialization
    for world in range(1, MAX_WORLD + 1)
    for specialization in (
        rank_barrier(world),
        put_signal(world),
        wait_signal(world),
        *(all_reduce(world, dtype, grid, protocol) for dtype in REDUCIBLE for grid, protocol in _GPU_CHOICES),
    )
)

__all__ = [
    "SHIPPED",
    "Specialization",
    "all_reduce",
    "compiled",
    "null_pointer",
    "peers_placeholder",
    "put_signal",
    "rank_barrier",
    "wait_signal",
]
