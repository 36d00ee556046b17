# SPDX-License-Identifier: Apache-2.0
"""One algorithm a file, built from primitives; and :data:`SHIPPED`, every specialization that dispatch may choose.

Tests compile all of it, ``python -m flycomm compile`` writes it out. A kernel of your own becomes a launch handle the
same way: ``compiled(Specialization(name, build, world, dtype, blocks, threads))``, with ``null_pointer`` and
``peers_placeholder`` among the arguments that compile it (``examples/02_in_kernel.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flycomm.channel import MAX_WORLD
from flycomm.dtypes import REDUCIBLE
from flycomm.geometry import RESIDENT_THREADS, SYNC, Geometry, row_threads
from flycomm.kernels import (
    all_reduce_one_shot,
    all_reduce_pull,
    all_reduce_two_shot,
    barrier,
    gather,
    point_to_point,
    reduce_norm,
    scatter,
)
from flycomm.kernels._bound import Bound, bind
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._specialization import Specialization, compiled
from flycomm.tables import FUSED, shipped

GATHER_UNITS = gather.UNITS  # bytes that a gather may write at once, the most first
_ARCHES = ("sm_90", "gfx942", "gfx950")  # with a table of their own


def all_reduce(
    world: int, dtype: str, geometry: Geometry, protocol: str = "flags", reduction: str = "sum"
) -> Specialization:
    """All-reduce by one of ``tables.PROTOCOLS``."""
    if protocol == "two_shot":
        build = all_reduce_two_shot.build(reduction)
    else:
        build = all_reduce_one_shot.build(protocol, reduction)
    return _specialize(f"all_reduce_{protocol}{_suffix(reduction)}", build, world, dtype, geometry)


def all_reduce_symmetric(world: int, dtype: str, geometry: Geometry, reduction: str, in_place: bool) -> Specialization:
    """All-reduce of symmetric memory, read where it lies."""
    name = f"all_reduce_pull{'_in_place' if in_place else ''}{_suffix(reduction)}"
    return _specialize(name, all_reduce_pull.build(reduction, in_place), world, dtype, geometry)


def all_reduce_norm(
    world: int, dtype: str, geometry: Geometry, protocol: str, variant: reduce_norm.Variant
) -> Specialization:
    """All-reduce, residual and RMSNorm of rows, or of the sums of experts' rows."""
    name = f"all_reduce_norm_{protocol}_{variant.name}"
    build, resident = reduce_norm.build(protocol, variant), row_threads(geometry.threads)
    return Specialization(name, build, world, dtype, geometry.blocks, geometry.threads, resident)


def reduce_scatter(
    world: int, dtype: str, geometry: Geometry, protocol: str, reduction: str = "sum", aligned: bool = True
) -> Specialization:
    """Reduce-scatter; ``aligned``: every chunk begins at a multiple of 16 bytes."""
    name = f"reduce_scatter_{protocol}{_suffix(reduction)}" + ("" if aligned else "_unaligned")
    return _specialize(name, scatter.build(protocol, reduction, aligned), world, dtype, geometry)


def all_gather(world: int, geometry: Geometry, protocol: str, unit: int = 16) -> Specialization:
    """All-gather of rows that are a multiple of ``unit`` (of :data:`GATHER_UNITS`) bytes."""
    name = f"all_gather_{protocol}" + ("" if unit == GATHER_UNITS[0] else f"_by{unit}")
    return _specialize(name, gather.build(protocol, unit), world, "", geometry)


def _specialize(name: str, build: Callable[..., Any], world: int, dtype: str, geometry: Geometry) -> Specialization:
    return Specialization(name, build, world, dtype, geometry.blocks, geometry.threads, RESIDENT_THREADS)


def _suffix(reduction: str) -> str:
    return "" if reduction == "sum" else f"_{reduction}"


def rank_barrier(world: int) -> Specialization:
    return _specialize("barrier", barrier.build, world, "", SYNC)


def put_signal(world: int) -> Specialization:
    return _specialize("put_signal", point_to_point.build_put_signal, world, "", SYNC)


def wait_signal(world: int) -> Specialization:
    return _specialize("wait_signal", point_to_point.build_wait_signal, world, "", SYNC)


def _chosen(world: int) -> Iterator[Specialization]:
    """What the shipped tables choose: sums of aligned chunks, gathers of whole fragments."""
    yield from (rank_barrier(world), put_signal(world), wait_signal(world))
    for row in (row for arch in _ARCHES for row in shipped(arch).rows if row.worlds[0] <= world <= row.worlds[1]):
        if row.op in FUSED:
            continue  # a kernel for each model's hidden size
        if row.op == "all_gather":
            yield all_gather(world, row.geometry, row.protocol)
            continue
        if row.op == "all_reduce" and row.largest is None:
            yield from (
                all_reduce_symmetric(world, dtype, row.geometry, "sum", in_place)
                for dtype in REDUCIBLE
                for in_place in (False, True)
            )
        build = all_reduce if row.op == "all_reduce" else reduce_scatter
        yield from (build(world, dtype, row.geometry, row.protocol) for dtype in REDUCIBLE)


SHIPPED: tuple[Specialization, ...] = tuple(
    {one.name: one for world in range(1, MAX_WORLD + 1) for one in _chosen(world)}.values()
)

__all__ = [
    "GATHER_UNITS",
    "SHIPPED",
    "Bound",
    "Specialization",
    "all_gather",
    "all_reduce",
    "all_reduce_norm",
    "all_reduce_symmetric",
    "bind",
    "compiled",
    "null_pointer",
    "peers_placeholder",
    "put_signal",
    "rank_barrier",
    "reduce_scatter",
    "wait_signal",
]
