# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual add and RMSNorm of the rows of a matrix, in one kernel; optionally with the row in 8 bits.

A row is a block's: row ``i`` is that of block ``i % blocks``, whose threads hold it in registers from the sum to the
result. The exchange is the one-shot all-reduce's (flags, packets or sentinel), with the same bits. For each element::

    x            = round(sum over ranks)               to the data type, as the all-reduce alone does
    r            = f32(x) + f32(residual)
    residual_out = round(r)
    out          = round(r * (1 / sqrt(mean(r * r) + eps)) * weight)      rounded once; gemma: (1 + weight)
    quantized    = e4m3(out * (1 / scale))             of the rounded out

So the norm sees r before it is rounded, and what is quantized is what an unfused kernel would read: the results are
those of the all-reduce, followed by one kernel a step. Row bits depend on the row only. A rank's own part of the sum is
a row of ``source``, or the weighted sum of its experts' rows (``variant.experts``), rounded: all else is the same.

Arguments of a launch: ``(comm, tag, source, residual, weight, residual_out, out, quantized, scales, factors, index,
shared, rows, hidden, eps, stream)``. 16-byte aligned, contiguous, in the data type: ``source``, ``residual``,
``residual_out``, ``out`` (rows, hidden); ``weight`` (hidden,) in the data type or f32. ``quantized`` (rows, hidden)
bytes. ``scales``, f32: one to read ("static"), (rows,) ("token") or (rows, ceil(hidden / 128)) ("group") to write. Of
experts ``source`` is all rows, ``factors`` their weights, with ``index`` and ``shared`` as in
:class:`~flycomm.primitives.experts.Places`. What a variant does not use may be 0. ``rows`` > 0 and ``hidden`` i32: a
row is a whole number of 16 bytes, no longer than the variant's; ``eps`` f32. An output may be ``residual``, or
``source`` without experts. A staging slot holds ``slot_bytes`` (packets: twice that).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.dtypes import REDUCIBLE
from flycomm.geometry import RESIDENT_THREADS, row_threads
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._norm_variant import Variant, each_thread, size_for, slot_bytes
from flycomm.kernels._protocols import VERBS
from flycomm.kernels._quantized import store_quantized
from flycomm.primitives import fragment, norm, packet, sentinel
from flycomm.primitives.call import Call
from flycomm.primitives.decode import widen
from flycomm.primitives.experts import Places, load_experts
from flycomm.primitives.issue import loads_before
from flycomm.primitives.launch_order import in_turn
from flycomm.primitives.row import Rows, if_mine, load_row, post_row, store_row
from flycomm.primitives.row_loop import finish_rows, post_rows
from flycomm.primitives.take_row import take_row

__all__ = ["Variant", "build", "each_thread", "size_for", "slot_bytes"]


def _addresses(*pointers: Any) -> list[Any]:
    return [fx.Int64(fx.ptrtoint(pointer)) for pointer in pointers]


def _own(rows: Rows, variant: Variant, places: Places, row: Any) -> list[Any]:
    """This rank's part of row ``row`` (i32)."""
    if variant.experts is None:
        return load_row(rows, places.out, row)
    return load_experts(rows, variant.experts, places, row)


def _meet(rows: Rows, call: Call, verbs: Any) -> None:
    if verbs is fragment:
        fc.arrive(call)
        fc.wait(call)
    elif verbs is packet:
        packet.meet(call)
    else:
        sentinel.meet(call, rows.first, rows.step, rows.count)


def _round(rows: Rows, values: Any) -> list[Any]:
    return [value.to(rows.element) for value in values]


def _add(sums: Any, residual: Any) -> list[Any]:
    """f32, of the sums rounded as the all-reduce alone rounds them."""
    return [widen(value) + widen(other) for value, other in zip(sums, residual, strict=True)]


@cache
def build(protocol: str, variant: Variant) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for one protocol and variant: ``(world, dtype, blocks, threads)`` → launcher and placeholders.

    ``threads`` is a power of two, at least 64; raises :class:`UsageError` for another.
    """

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        norm.check_threads(threads)
        variant.check()
        verbs = VERBS[protocol]
        peers = fc.peers_type(world, blocks)
        element = getattr(fx, REDUCIBLE[dtype].fx_name)
        weight_type = getattr(fx, REDUCIBLE[variant.weight or dtype].fx_name)
        factor_type = getattr(fx, REDUCIBLE[(variant.experts and variant.experts.weight) or dtype].fx_name)
        each = each_thread(variant.hidden, dtype, threads)
        how = (variant.quantize, variant.fp8, variant.floor)

        @flyc.kernel(name=f"all_reduce_norm_{protocol}", known_block_size=[threads, 1, 1])
        def fused(
            comm: peers,
            tag: fx.Int32,
            source: fx.Pointer,
            residual: fx.Pointer,
            weight: fx.Pointer,
            residual_out: fx.Pointer,
            out: fx.Pointer,
            quantized: fx.Pointer,
            scales: fx.Pointer,
            factors: fx.Pointer,
            index: fx.Pointer,
            shared_rows: fx.Pointer,
            num_rows: fx.Int32,
            hidden: fx.Int32,
            eps: fx.Float32,
        ):
            in_turn(blocks, threads * RESIDENT_THREADS // row_threads(threads))
            shared = fx.SharedAllocator()
            slots = shared.allocate(fx.Array[fx.Float32, 2 * threads]).peek()
            source_at, residual_at, weight_at = _addresses(source, residual, weight)
            sum_at, normed_at, codes_at, scales_at = _addresses(residual_out, out, quantized, scales)
            size = variant.hidden if variant.exact else hidden
            rows = Rows(num_rows, size, element, each, blocks, threads, variant.single)
            factors_at, index_at, shared_at = _addresses(factors, index, shared_rows)
            places = Places(source_at, factors_at, index_at, shared_at, residual_at)

            def load(row: Any) -> list[Any]:
                return _own(rows, variant, places, row)

            def post(row: Any, own: Any) -> None:
                post_row(rows, call, verbs.post, row, own)

            def finish(row: Any, turn: Any, own: Any, residual: Any) -> None:
                added = _add(take_row(rows, call, verbs, row, own), residual)

                def store_sum() -> None:
                    store_row(rows, sum_at, row, _round(rows, added))

                fold = slots, turn, threads, variant.gemma, store_sum
                normed = norm.rms_norm_row(added, rows.inside, weights, size, eps, *fold)
                out = _round(rows, normed)
                if variant.normed:
                    store_row(rows, normed_at, row, out)
                if variant.quantize != "none":
                    store_quantized(rows, row, out, *how, codes_at, scales_at, slots, turn + fx.Int32(1))

            def load_and_finish(row: Any, turn: Any, own: Any) -> None:
                finish(row, turn, own, load_row(rows, residual_at, row))  # on its way while the peers' parts are

            if fx.const_expr(variant.single):
                own = load(rows.row)  # before the state, whose answer is waited for
                loads_before()
                call = verbs.begin(comm, tag, shared)
                residual = load_row(rows, residual_at, rows.row)
                weights = load_row(rows, weight_at, fx.Int32(0), weight_type)
                if_mine(rows, lambda: post(rows.row, own))
                _meet(rows, call, verbs)
                if_mine(rows, lambda: finish(rows.row, fx.Int32(0), own, residual))
            else:
                call = verbs.begin(comm, tag, shared)
                first = post_rows(rows, load, post)
                weights = load_row(rows, weight_at, fx.Int32(0), weight_type)
                _meet(rows, call, verbs)
                finish_rows(rows, first, load, load_and_finish, 2 if variant.quantize == "token" else 1)
            verbs.finish(call)

        @flyc.jit
        def launch(
            comm: peers,
            tag: fx.Int32,
            source: fx.Pointer,
            residual: fx.Pointer,
            weight: fx.Pointer,
            residual_out: fx.Pointer,
            out: fx.Pointer,
            quantized: fx.Pointer,
            scales: fx.Pointer,
            factors: fx.Pointer,
            index: fx.Pointer,
            shared_rows: fx.Pointer,
            rows: fx.Int32,
            hidden: fx.Int32,
            eps: fx.Float32,
            stream: fx.Stream,
        ):
            addresses = source, residual, weight, residual_out, out, quantized, scales, factors, index, shared_rows
            fused(comm, tag, *addresses, rows, hidden, eps).launch(grid=(blocks,), block=(threads,), stream=stream)

        data, scale = null_pointer(element, 16), null_pointer(fx.Float32, 4)
        pointers = (data, data, null_pointer(weight_type, 16), data, data, null_pointer(fx.Uint8, 16), scale)
        of_experts = (null_pointer(factor_type, factor_type.width // 8), null_pointer(fx.Int32, 4), data)
        return launch, (peers_placeholder(world, blocks), 0, *pointers, *of_experts, 1, 1, 1.0, fx.Stream(None))

    return build_one
