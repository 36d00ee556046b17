# SPDX-License-Identifier: Apache-2.0
"""One algorithm a file, built from primitives; and :data:`SHIPPED`, every specialization that dispatch may choose.

Tests compile all of it, ``python -m flycomm compile`` writes it out. A kernel of your own becomes a launch handle the
same way: ``compiled(Specialization(name, build, world, dtype, blocks, threads))``, with ``null_pointer`` and
``peers_placeholder`` among the arguments that compile it (``examples/02_in_kernel.py``).
"""

from __future__ import annotations

from flycomm.channel import MAX_WORLD
from flycomm.dtypes import REDUCIBLE
from flycomm.geometry import GPU_GEOMETRIES, SYNC, Geometry
from flycomm.kernels import all_reduce_one_shot, barrier, point_to_point
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._specialization import Specialization, compiled


def all_reduce(world: int, dtype: str, geometry: Geometry) -> Specialization:
    """One-shot all-reduce with flags."""
    return Specialization(
        "all_reduce_one_shot", all_reduce_one_shot.build, world, dtype, geometry.blocks, geometry.threads
    )


def rank_barrier(world: int) -> Specialization:
    return Specialization("barrier", barrier.build, world, "", SYNC.blocks, SYNC.threads)


def put_signal(world: int) -> Specialization:
    return Specialization("put_signal", point_to_point.build_put_signal, world, "", SYNC.blocks, SYNC.threads)


def wait_signal(world: int) -> Specialization:
    return Specialization("wait_signal", point_to_point.build_wait_signal, world, "", SYNC.blocks, SYNC.threads)


SHIPPED: tuple[Specialization, ...] = tuple(
    specialization
    for world in range(1, MAX_WORLD + 1)
    for specialization in (
        rank_barrier(world),
        put_signal(world),
        wait_signal(world),
        *(all_reduce(world, dtype, geometry) for dtype in REDUCIBLE for geometry in GPU_GEOMETRIES),
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
