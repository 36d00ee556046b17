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
those of the all-reduce, followed by one kernel a step. Row bits depend on the row only.

Arguments of a launch: ``(comm, tag, source, residual, weight, residual_out, out, quantized, scales, rows, hidden, eps,
stream)``. 16-byte aligned, contiguous, in the data type: ``source``, ``residual``, ``residual_out``, ``out`` (rows,
hidden); ``weight`` (hidden,) in the data type or f32. ``quantized`` (rows, hidden) bytes. ``scales``, f32: one to read
("static"), (rows,) ("token") or (rows, ceil(hidden / 128)) ("group") to write. What a variant does not use may be 0.
``rows`` > 0 and ``hidden`` i32: a row is a whole number of 16 bytes, no longer than the variant's; ``eps`` f32. An
output may be ``source`` or ``residual``. A staging slot holds ``slot_bytes`` (packets: twice that).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.channel import FRAGMENT_BYTES
from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._protocols import VERBS
from flycomm.kernels._quantized import QUANTS, store_quantized
from flycomm.primitives import fragment, norm, packet, quant, sentinel
from flycomm.primitives.call import Call
from flycomm.primitives.row import Rows, each_row, load_row, post_row, store_row
from flycomm.primitives.take_row import take_row


@dataclass(frozen=True)
class Variant:
    """What is fixed when the kernel is compiled, beside the grid.

    ``hidden``: elements of the longest row; shorter ones do as well. ``weight``: "" for the data type, or "f32".
    ``gemma``: the factor is 1 + weight. ``quantize``: one of ``QUANTS``, in ``fp8``; the least scale of a token or
    group is ``floor``. ``normed``: whether ``out`` is written.
    """

    hidden: int
    weight: str = ""
    gemma: bool = False
    quantize: str = "none"
    fp8: quant.Fp8 = quant.E4M3FN
    floor: float = 1.0 / (448.0 * 512.0)
    normed: bool = True


def each_thread(hidden: int, dtype: str, threads: int) -> int:
    """How many fragments of a row of up to ``hidden`` elements a thread holds."""
    return -(-hidden // (REDUCIBLE[dtype].per_fragment * threads))


def slot_bytes(rows: int, hidden: int, dtype: str, blocks: int, threads: int) -> int:
    """Of a staging slot for ``rows`` rows of a variant with ``hidden``; packets need twice as much."""
    return -(-rows // blocks) * each_thread(hidden, dtype, threads) * blocks * threads * FRAGMENT_BYTES


def _addresses(*pointers: Any) -> list[Any]:
    return [fx.Int64(fx.ptrtoint(pointer)) for pointer in pointers]


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


def _add(rows: Rows, totals: Any, residual: Any) -> list[Any]:
    """f32, of the sums rounded as the all-reduce alone rounds them."""
    sums = [value.to(fx.Float32) for value in _round(rows, totals)]
    return [value + other.to(fx.Float32) for value, other in zip(sums, residual, strict=True)]


@cache
def build(protocol: str, variant: Variant) -> Callable[[int, str, int, int], tuple[Any, tuple[Any, ...]]]:
    """The builder for one protocol and variant: ``(world, dtype, blocks, threads)`` → launcher and placeholders.

    ``threads`` is a power of two, at least 64; raises :class:`UsageError` for another.
    """

    def build_one(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        norm.check_threads(threads)
        if variant.quantize not in QUANTS:
            raise UsageError(f"quantize={variant.quantize!r} is not one of {', '.join(QUANTS)}; pass one of these")
        verbs = VERBS[protocol]
        peers = fc.peers_type(world, blocks)
        element = getattr(fx, REDUCIBLE[dtype].fx_name)
        weight_type = getattr(fx, REDUCIBLE[variant.weight or dtype].fx_name)
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
            num_rows: fx.Int32,
            hidden: fx.Int32,
            eps: fx.Float32,
        ):
            shared = fx.SharedAllocator()
            slots = shared.allocate(fx.Array[fx.Float32, 2 * threads]).peek()
            source_at, residual_at, weight_at = _addresses(source, residual, weight)
            sum_at, normed_at, codes_at, scales_at = _addresses(residual_out, out, quantized, scales)
            rows = Rows(num_rows, hidden, element, each, blocks, threads)
            call = verbs.begin(comm, tag, shared)

            def post(row: Any, _: Any) -> None:
                post_row(rows, call, verbs.post, row, load_row(rows, source_at, row))

            def finish(row: Any, turn: Any) -> None:
                own = load_row(rows, source_at, row)
                residual = load_row(rows, residual_at, row)  # on its way while the peers' parts are
                added = _add(rows, take_row(rows, call, verbs, row, own), residual)
                store_row(rows, sum_at, row, _round(rows, added))
                normed = norm.rms_norm_row(added, weights, hidden, eps, slots, turn, threads, variant.gemma)
                out = _round(rows, normed)
                if variant.normed:
                    store_row(rows, normed_at, row, out)
                if variant.quantize != "none":
                    store_quantized(rows, row, out, *how, codes_at, scales_at, slots, turn + fx.Int32(1))

            each_row(rows, post)
            weights = load_row(rows, weight_at, fx.Int32(0), weight_type)
            _meet(rows, call, verbs)
            each_row(rows, finish, 2 if variant.quantize == "token" else 1)
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
            rows: fx.Int32,
            hidden: fx.Int32,
            eps: fx.Float32,
            stream: fx.Stream,
        ):
            fused(comm, tag, source, residual, weight, residual_out, out, quantized, scales, rows, hidden, eps).launch(
                grid=(blocks,), block=(threads,), stream=stream
            )

        data, scale = null_pointer(element, 16), null_pointer(fx.Float32, 4)
        pointers = (data, data, null_pointer(weight_type, 16), data, data, null_pointer(fx.Uint8, 16), scale)
        return launch, (peers_placeholder(world, blocks), 0, *pointers, 1, 1, 1.0, fx.Stream(None))

    return build_one
