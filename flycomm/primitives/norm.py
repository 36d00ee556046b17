# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of a row that a block holds in registers, with bits that depend on the row and the formula alone.

A row of ``hidden`` elements is cut into fragments of 16 bytes; thread ``t`` of a block of ``threads`` holds the
fragments ``t, t + threads, …``. The squares of a fragment are added one after the other, with one rounding each (fma);
the sums of fragments along one binary tree over their indices, the highest bit first. What is past the end adds +0. So
neither the number of threads nor the warp's width nor the batch changes a bit, and every target computes the same ones:
division and square root are IEEE 754's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.expr as fx

from flycomm.errors import UsageError
from flycomm.primitives.decode import widen

Combine = Callable[[Any, Any], Any]


def check_threads(threads: int) -> None:
    """Raise :class:`UsageError` unless a block of ``threads`` can reduce along the tree, on every target."""
    if threads < 64 or threads & (threads - 1):
        raise UsageError(f"a block of {threads} threads does not reduce a row; use a power of two, 64 or more")


def fold(values: Sequence[Any], combine: Combine) -> Any:
    """``values`` combined along a binary tree over their indices, the highest bit first. At least one."""
    level = list(values)
    while len(level) > 1:
        half = 1 << ((len(level) - 1).bit_length() - 1)
        level = [combine(low, level[half + i]) if half + i < len(level) else low for i, low in enumerate(level[:half])]
    return level[0]


def fold_lanes(value: Any, width: int, combine: Combine) -> Any:
    """The tree over ``width`` (a power of two) neighbouring lanes of a warp; every one of them gets the result.

    Every lane of the warp calls it. ``combine`` commutes to the bit, as sums and maxima do: lanes differ in the order
    of its arguments. Shuffles are told the whole warp's width: on NVIDIA a narrower one has only the first lanes of the
    warp take part.
    """
    whole, offset = fx.gpu.num_warp_threads(), width // 2
    while offset:
        value = combine(value, fx.gpu.shuffle_xor(value, offset, whole))
        offset //= 2
    return value


def nothing() -> None:
    """The default of ``meanwhile``."""


def fold_block(
    value: Any, combine: Combine, slots: Any, turn: Any, threads: int, meanwhile: Callable[[], None] = nothing
) -> Any:
    """The tree over the ``threads`` threads of a block (``check_threads``); every one of them gets the result.

    Every thread of the block calls it. ``slots`` is shared memory for ``2 * threads`` values; ``turn`` (i32, the same
    in the block) is 0, 1, 2, …, one more at every use of the slots: uses in a row take the two halves in turn, so the
    one block barrier in it is enough. Orders nothing else; no peer takes part. ``meanwhile()`` is called once, behind
    the barrier: what else there is to do, in the shadow of the tree's latency.
    """
    width = min(fx.gpu.num_warp_threads(), threads)
    if threads > width:
        thread = fx.Int32(fx.thread_idx.x)
        base = (turn & fx.Int32(1)) * fx.Int32(threads)
        slots[base + thread] = value
        fx.gpu.barrier()
        lane = base + thread % fx.Int32(width)
        values = [slots[lane + fx.Int32(first)] for first in range(0, threads, width)]
        meanwhile()
        return fold_lanes(fold(values, combine), width, combine)
    meanwhile()
    return fold_lanes(value, width, combine)


def add(left: Any, right: Any) -> Any:
    return left + right


def _squares(fragment: Any, inside: Any) -> Any:
    total = fx.Float32(0.0)
    for e in range(fragment.numel):
        total = fx.fma(fragment[e], fragment[e], total)
    return inside.select(total, fx.Float32(0.0))


def sum_of_squares(
    row: Sequence[Any],
    inside: Sequence[Any],
    slots: Any,
    turn: Any,
    threads: int,
    meanwhile: Callable[[], None] = nothing,
) -> Any:
    """The sum (f32) of the squares of a row, the same in every thread; :func:`fold_block` has the contract.

    ``row`` is this thread's fragments as f32 vectors, equally many in every thread; ``inside`` (bool): which of them
    are in the row.
    """
    squares = [_squares(fragment, here) for fragment, here in zip(row, inside, strict=True)]
    return fold_block(fold(squares, add), add, slots, turn, threads, meanwhile)


def rms_norm_row(
    row: Sequence[Any],
    inside: Sequence[Any],
    weights: Sequence[Any],
    hidden: Any,
    eps: Any,
    slots: Any,
    turn: Any,
    threads: int,
    gemma: bool = False,
    meanwhile: Callable[[], None] = nothing,
) -> list[Any]:
    """``row * (1 / sqrt(mean(row²) + eps)) * weight`` in f32, as f32 vectors shaped like ``row``; not rounded further.

    ``row``: this thread's fragments as f32 vectors; ``inside`` (bool): which of them are in the row of ``hidden``
    (i32, or a compile-time int) elements. ``weights``: the same elements of the weight, vectors of any float type;
    ``gemma``: the factor is ``1 + weight``. ``eps``: f32. Called by every thread of the block; contains one block
    barrier; ``slots``, ``turn`` and ``meanwhile`` are those of :func:`fold_block`.
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. A NaN anywhere makes the whole row NaN.
    """
    total = sum_of_squares(row, inside, slots, turn, threads, meanwhile)
    count = fx.Float32(float(hidden)) if isinstance(hidden, int) else hidden.to(fx.Float32)
    scale = fx.Float32(1.0) / fx.sqrt(total / count + eps)
    normed = []
    for fragment, weight in zip(row, weights, strict=True):
        factor = widen(weight)
        if gemma:
            factor = factor + fx.Vector.filled(factor.numel, 1.0, fx.Float32)
        normed.append(fragment * fx.Vector.filled(fragment.numel, scale, fx.Float32) * factor)
    return normed
