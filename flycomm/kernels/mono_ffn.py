# SPDX-License-Identifier: Apache-2.0
"""A feed-forward layer of decode under tensor parallelism, with what follows it, in one launch::

    act          = round(silu(x @ gate.T) * (x @ up.T))               (rows, inter)     f32 until rounded
    partial      = round(act @ down.T)                                (rows, hidden)    this rank's
    r            = f32(round(sum of partial over ranks)) + f32(residual)
    residual_out = round(r)                                           the same bits on all ranks
    out          = round((round(r * norm_weight) @ projection.T) * (1 / sqrt(mean(r * r) + eps)))     (rows, out)

Four stages, one grid; a block does its tiles of each in turn (``primitives/schedule.py``). Between stages blocks meet
by ready marks, ranks once, in the middle, by fragments. Before each wait a block loads the weights that it needs
after it: they don't depend on what it waits for. Products are made by ``primitives/dot`` up to 4 rows, and by matrix
instructions from 4 on (``primitives/block_product``), or as ``math`` says. RMSNorm's factor is one number a row, so the
projection runs on the row without it and its result is multiplied: nobody waits for a norm. Sums are in f32, in an
order that depends on the shape and on how products are made: the bits of a row depend neither on the batch, within
what has the same ``math``, nor on the grid.

Arguments of a launch: ``(comm, tag, x, residual, gate_up, down, norm_weight, projection, residual_out, out, scratch,
rows, eps, stream)``. bf16, contiguous, 16-byte aligned: ``x``, ``residual``, ``residual_out`` (rows, hidden), ``out``
(rows, out), ``gate_up`` (2 * inter, hidden), gate first, ``down`` (hidden, inter), ``norm_weight`` (hidden,),
``projection`` (out, hidden); ``inter`` and ``out`` are this rank's. ``residual_out`` may be ``residual``. ``scratch``:
``scratch_bytes`` of device memory, zeros before the first launch, of this channel alone. ``rows`` i32, 1 to the
layer's; ``eps`` f32. A staging slot holds ``slot_bytes``. All blocks are resident together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.errors import UsageError
from flycomm.kernels import _mono_ffn_stages as own
from flycomm.kernels import _mono_stages as stages
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._mono_layer import MATHS, PROTOCOLS, ROWS, by_matrix, check_layer, slot_bytes
from flycomm.kernels._mono_products import partials, partials_ahead, shared_sums
from flycomm.kernels._mono_work import COLUMNS
from flycomm.kernels._protocols import VERBS
from flycomm.primitives import ready
from flycomm.primitives.block_product import UNIT
from flycomm.primitives.dot import GROUP

__all__ = ["MATHS", "PROTOCOLS", "ROWS", "Layer", "build", "scratch_bytes", "slot_bytes"]


@dataclass(frozen=True)
class Layer:
    """What is fixed when the kernel is compiled, beside the grid: elements of a row; rows at most, one of ``ROWS``."""

    hidden: int
    inter: int  # this rank's
    out: int  # this rank's
    rows: int
    protocol: str = "packets"
    math: str = "auto"  # of MATHS: how it multiplies; rows have other bits by "dot" and by "matrix"

    def check(self, dtype: str, threads: int) -> None:
        """Raise :class:`UsageError` for what the kernel cannot do."""
        check_layer(self, dtype, threads)
        if min(self.hidden, self.inter, self.out) < 1 or self.hidden % 8 or self.inter % 8 or self.out % 2:
            raise UsageError(
                f"hidden {self.hidden}, inter {self.inter}, out {self.out}: the first two must be multiples of 8, the "
                "last of 2; pad the weights"
            )

    @property
    def tiles(self) -> dict[str, int]:
        """Stage → tiles, for ``schedule.task_table``; a tile is what a group of 32 lanes makes at a time, or a block by
        matrix instructions."""
        if by_matrix(self):
            units = self.inter // own.PAIRS, -(-self.hidden // UNIT), -(-self.out // UNIT)
            return dict(zip(("gate_up", "down", "projection"), units, strict=True))
        return {"gate_up": self.inter, "down": self.hidden // COLUMNS, "projection": self.out // 2}


def scratch_bytes(layer: Layer, blocks: int) -> int:
    """Of the device memory in which stages hand over: marks, sums of squares, weighted rows, activations."""
    return _shape(layer, blocks, GROUP).num_bytes


def _shape(layer: Layer, blocks: int, threads: int) -> own.Shape:
    return own.Shape(layer.hidden, layer.inter, layer.rows, blocks, threads, by_matrix(layer), layer.out)


def _address(pointer: Any) -> Any:
    return fx.Int64(fx.ptrtoint(pointer))


@cache
def build(layer: Layer) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for one layer: ``(world, "bf16", blocks, threads)`` → launcher and placeholders.

    ``threads`` is a multiple of 64. Raises :class:`UsageError` for a layer that the kernel cannot do.
    """

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        layer.check(dtype, threads)
        verbs = VERBS[layer.protocol]
        peers = fc.peers_type(world, blocks)
        shape = _shape(layer, blocks, threads)

        @flyc.kernel(name=f"mono_ffn_{layer.protocol}", known_block_size=[threads, 1, 1])
        def mono_ffn(
            comm: peers,
            tag: fx.Int32,
            x: fx.Pointer,
            residual: fx.Pointer,
            gate_up: fx.Pointer,
            down: fx.Pointer,
            norm_weight: fx.Pointer,
            projection: fx.Pointer,
            residual_out: fx.Pointer,
            out: fx.Pointer,
            scratch: fx.Pointer,
            rows: fx.Int32,
            eps: fx.Float32,
        ):
            shared = fx.SharedAllocator()
            scales = shared.allocate(fx.Array[fx.Float32, layer.rows]).peek()
            call = verbs.begin(comm, tag, shared)
            work = own.Work(shape, rows, _address(scratch))
            slots = shared_sums(shared, work.products)
            down_at, projection_at = _address(down), _address(projection)

            fc.stage(call, "gate_up")
            own.gate_up(work, _address(x), _address(gate_up), slots)
            ready.mark(call, work.marks, call.block)
            fc.stage(call, "down")
            ahead = partials_ahead(work, down_at)
            ready.wait(call, work.marks, fx.Int32(0), fx.Int32(blocks))

            made = partials(work, work.act, down_at, ahead, slots)
            fc.stage(call, "reduce")
            hidden_by = partial(own.projection_ahead, work, projection_at)
            before = _address(residual), _address(norm_weight)
            _, ahead = stages.all_reduce(work, call, layer.protocol, made, hidden_by, *before, _address(residual_out))
            ready.mark(call, work.marks, fx.Int32(blocks) + call.block)
            fc.stage(call, "projection")
            ready.wait(call, work.marks, fx.Int32(blocks), fx.Int32(blocks))

            stages.norm_factors(work, scales, eps)
            own.project(work, call, projection_at, ahead, scales, _address(out), slots)
            verbs.finish(call)

        @flyc.jit
        def launch(
            comm: peers,
            tag: fx.Int32,
            x: fx.Pointer,
            residual: fx.Pointer,
            gate_up: fx.Pointer,
            down: fx.Pointer,
            norm_weight: fx.Pointer,
            projection: fx.Pointer,
            residual_out: fx.Pointer,
            out: fx.Pointer,
            scratch: fx.Pointer,
            rows: fx.Int32,
            eps: fx.Float32,
            stream: fx.Stream,
        ):
            mono_ffn(
                *(comm, tag, x, residual, gate_up, down, norm_weight),
                *(projection, residual_out, out, scratch, rows, eps),
            ).launch(grid=(blocks,), block=(threads,), stream=stream)

        nulls = [null_pointer(fx.BFloat16, 16)] * 9
        return launch, (peers_placeholder(world, blocks), 0, *nulls, 1, 1.0, fx.Stream(None))

    return build_one
