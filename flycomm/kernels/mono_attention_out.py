# SPDX-License-Identifier: Apache-2.0
"""What follows attention in a decode step under tensor parallelism, up to the choice of experts, in one launch::

    partial      = round(x @ o_proj.T)                                (rows, hidden)     this rank's
    r            = f32(round(sum of partial over ranks)) + f32(residual)
    residual_out = round(r)
    factor       = 1 / sqrt(mean(r * r) + eps)                        (rows, 1)
    normed       = round((r * norm_weight) * factor)                  (rows, hidden)     what the experts read
    logits       = (round(r * norm_weight) @ router.T) * factor       (rows, experts)    f32, of rows in router's type
    scores       = softmax(logits) or sigmoid(logits)                 (rows, experts)    f32
    topk_ids     = the top_k by scores + bias, or by logits           (rows, top_k)      best first; ties: lower id
    topk_weights = scores[topk_ids], divided by their sum on request  (rows, top_k)

Stages: the projection, which waits for nothing; its all-reduce, with the router's weights loaded before the takes; the
router, dealt out over all blocks; the selection, a row a group of lanes. Blocks meet twice by ready marks, ranks once,
by fragments. As in :mod:`flycomm.kernels.mono_ffn` the router multiplies rows that are not normed yet, and logits are
multiplied by the factor; ``normed`` is written by the lanes that hold ``r``, while others are still at the logits. All
ranks hold the same bits in all four results; a row's bits depend on the shape alone.

Arguments of a launch: ``(comm, tag, x, residual, o_proj, norm_weight, router, bias, residual_out, normed, topk_ids,
topk_weights, scratch, rows, eps, stream)``. Contiguous, 16-byte aligned. bf16: ``x`` (rows, inner), ``residual``,
``residual_out``, ``normed`` (rows, hidden), ``o_proj`` (hidden, inner), ``norm_weight`` (hidden,); ``inner`` is this
rank's. The same on all ranks: ``router`` (experts, hidden) of the layer's ``router`` type, ``bias`` (experts,) f32, any
address if the layer has none. ``topk_ids`` i32 and ``topk_weights`` f32, (rows, top_k). ``residual_out`` may be
``residual``. ``scratch``: ``scratch_bytes`` of device memory, zeros before the first launch, of this channel alone.
``rows`` i32, 1 to the layer's; ``eps`` f32. A staging slot holds ``slot_bytes``. All blocks are resident together.

A row with a NaN logit has ids of -1 and weights of NaN. What a call that failed leaves is right, or it is -1 and NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from flycomm.kernels import _mono_router_stages as own
from flycomm.kernels import _mono_stages as stages
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._mono_layer import by_matrix, check_layer, slot_bytes
from flycomm.kernels._mono_products import partials, partials_ahead, shared_sums
from flycomm.kernels._mono_select_stages import MAX_EXPERTS, MAX_TOP_K, SCORINGS, Choice, select, store_normed
from flycomm.kernels._mono_work import COLUMNS
from flycomm.kernels._protocols import VERBS
from flycomm.primitives import ready
from flycomm.primitives.block_product import UNIT
from flycomm.primitives.dot import GROUP

ROUTERS = ("bf16", "f32")

__all__ = ["ROUTERS", "Layer", "build", "scratch_bytes", "slot_bytes"]


@dataclass(frozen=True)
class Layer:
    """What is fixed when the kernel is compiled, beside the grid; rows at most: one of ``mono_ffn.ROWS``."""

    hidden: int
    inner: int  # this rank's: elements of its heads
    experts: int
    top_k: int
    rows: int
    router: str = "bf16"  # type of the router's weights, and what rows are rounded to for it
    scoring: str = "softmax"
    bias: bool = False  # a correction is added to scores when experts are chosen, and not to weights
    renormalize: bool = True  # weights of a row are divided by their sum
    protocol: str = "packets"
    math: str = "auto"  # of mono_ffn.MATHS: how it multiplies; a router in f32 is by dot products in any case

    def check(self, dtype: str, threads: int) -> None:
        """Raise :class:`UsageError` for what the kernel cannot do."""
        check_layer(self, dtype, threads)
        if min(self.hidden, self.inner) < 1 or self.hidden % own.SLICE_ELEMENTS or self.inner % 8:
            raise UsageError(
                f"hidden {self.hidden}, inner {self.inner}: multiples of {own.SLICE_ELEMENTS} and of 8 are needed; pad "
                "the weights"
            )
        if not 1 <= self.top_k <= min(MAX_TOP_K, self.experts) or self.experts > MAX_EXPERTS:
            raise UsageError(
                f"the best {self.top_k} of {self.experts} experts; a group of lanes finds up to {MAX_TOP_K} of up to "
                f"{MAX_EXPERTS}, so route apart from this layer"
            )
        if self.router not in ROUTERS or self.scoring not in SCORINGS:
            raise UsageError(
                f"a router of {self.router!r} by {self.scoring!r}; take one of {', '.join(ROUTERS)}, by one of "
                f"{', '.join(SCORINGS)}"
            )

    @property
    def tiles(self) -> dict[str, int]:
        """As those of ``mono_ffn.Layer``."""
        projection = -(-self.hidden // UNIT) if by_matrix(self) else self.hidden // COLUMNS
        return {"projection": projection, "router": _shape(self, 1, GROUP).router_tiles, "select": self.rows}


def _shape(layer: Layer, blocks: int, threads: int) -> own.Shape:
    of_router = layer.experts, layer.top_k, layer.router
    return own.Shape(layer.hidden, layer.inner, layer.rows, blocks, threads, by_matrix(layer), *of_router)


def scratch_bytes(layer: Layer, blocks: int) -> int:
    """Of the device memory in which stages hand over: marks, sums of squares, weighted rows, parts of logits."""
    return _shape(layer, blocks, GROUP).num_bytes


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

        @flyc.kernel(name=f"mono_attention_out_{layer.protocol}", known_block_size=[threads, 1, 1])
        def mono_attention_out(
            comm: peers,
            tag: fx.Int32,
            x: fx.Pointer,
            residual: fx.Pointer,
            o_proj: fx.Pointer,
            norm_weight: fx.Pointer,
            router: fx.Pointer,
            bias: fx.Pointer,
            residual_out: fx.Pointer,
            normed: fx.Pointer,
            topk_ids: fx.Pointer,
            topk_weights: fx.Pointer,
            scratch: fx.Pointer,
            rows: fx.Int32,
            eps: fx.Float32,
        ):
            shared = fx.SharedAllocator()
            scales = shared.allocate(fx.Array[fx.Float32, layer.rows]).peek()
            call = verbs.begin(comm, tag, shared)
            work = own.Work(shape, rows, _address(scratch))
            slots = shared_sums(shared, work.products)
            router_at = _address(router)

            made = partials(work, _address(x), _address(o_proj), partials_ahead(work, _address(o_proj)), slots)
            hidden_by = partial(own.router_ahead, work, router_at)
            before = _address(residual), _address(norm_weight)
            weighted, ahead = stages.all_reduce(
                work, call, layer.protocol, made, hidden_by, *before, _address(residual_out)
            )
            ready.mark(call, work.marks, call.block)
            ready.wait(call, work.marks, fx.Int32(0), fx.Int32(blocks))

            own.route(work, router_at, ahead, slots)
            ready.mark(call, work.marks, fx.Int32(blocks) + call.block)
            stages.norm_factors(work, scales, eps)
            store_normed(work, call, scales, weighted, _address(normed))
            makers = work.selects.select(fx.Int32(shape.router_blocks), fx.Int32(0))
            ready.wait(call, work.marks, fx.Int32(blocks), makers)

            correction = _address(bias) if layer.bias else None
            chosen_at = _address(topk_ids), _address(topk_weights)
            select(work, call, scales, Choice(layer.scoring, layer.renormalize, correction, *chosen_at))
            verbs.finish(call)

        @flyc.jit
        def launch(
            comm: peers,
            tag: fx.Int32,
            x: fx.Pointer,
            residual: fx.Pointer,
            o_proj: fx.Pointer,
            norm_weight: fx.Pointer,
            router: fx.Pointer,
            bias: fx.Pointer,
            residual_out: fx.Pointer,
            normed: fx.Pointer,
            topk_ids: fx.Pointer,
            topk_weights: fx.Pointer,
            scratch: fx.Pointer,
            rows: fx.Int32,
            eps: fx.Float32,
            stream: fx.Stream,
        ):
            mono_attention_out(
                *(comm, tag, x, residual, o_proj, norm_weight, router, bias),
                *(residual_out, normed, topk_ids, topk_weights, scratch, rows, eps),
            ).launch(grid=(blocks,), block=(threads,), stream=stream)

        data, number = null_pointer(fx.BFloat16, 16), null_pointer(fx.Float32, 16)
        weights = null_pointer(getattr(fx, REDUCIBLE[layer.router].fx_name), 16)
        pointers = (data, data, data, data, weights, number, data, data, null_pointer(fx.Int32, 16), number, data)
        return launch, (peers_placeholder(world, blocks), 0, *pointers, 1, 1.0, fx.Stream(None))

    return build_one
