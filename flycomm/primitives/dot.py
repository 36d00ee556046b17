# SPDX-License-Identifier: Apache-2.0
"""Dot products of a few token rows with rows of a weight matrix, by groups of 32 lanes: decode's matrix-vector product.

A group owns some weight rows and sees all of their columns: lane ``l`` has the fragments ``l, l + 32, …`` (16 bytes) of
each row, multiplies them with those of every token row, and adds in f32, element after element (fma). The lanes' sums
meet along a tree. So weights are read once whatever the number of token rows, and neither the grid, the block nor the
warp's width (32 or 64) changes a bit. Activations come through the caches.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives.access import load_fragment
from flycomm.primitives.norm import add, fold_lanes

GROUP = 32  # lanes that work on one tile; divides a warp on every target


class Dot:
    """The shape of a product: rows of ``length`` elements of ``element``, a whole number of fragments. Trace-time only.

    ``steps``: how many fragments of a row a lane has.
    """

    def __init__(self, length: int, element: Any):
        self.element = element
        self.fragments = length * element.width // (8 * FRAGMENT_BYTES)
        self.steps = -(-self.fragments // GROUP)
        self.row_bytes = self.fragments * FRAGMENT_BYTES
        self.lane = fx.Int32(fx.thread_idx.x) % fx.Int32(GROUP)

    def row(self, matrix: Any, index: Any) -> Any:
        """Address (i64) of row ``index`` (i32) of the matrix at ``matrix`` (i64)."""
        return matrix + fx.Int64(index) * fx.Int64(self.row_bytes)

    def load(self, row: Any, step: int) -> Any:
        """This lane's fragment of ``step`` of the row at ``row`` (i64); zeros past its end."""
        place = self.lane + fx.Int32(step * GROUP)
        if (step + 1) * GROUP <= self.fragments:
            return load_fragment(row + fx.Int64(place) * fx.Int64(FRAGMENT_BYTES), self.element)
        inside = place < fx.Int32(self.fragments)
        address = row + fx.Int64(inside.select(place, fx.Int32(0))) * fx.Int64(FRAGMENT_BYTES)
        value = load_fragment(address, self.element)
        return inside.select(value, fx.Vector.filled(value.numel, 0.0, self.element))


def load_ahead(dot: Dot, weights: Sequence[Any], most: int) -> list[list[Any]]:
    """The first steps' fragments of the weight rows at ``weights`` (i64), at most ``most`` of them in all.

    For weights, which no kernel in flight writes: called before a wait, so that they travel meanwhile. They occupy four
    registers each until :func:`products` uses them. Orders nothing.
    """
    return [[dot.load(row, step) for row in weights] for step in range(min(dot.steps, most // len(weights)))]


def products(
    dot: Dot, weights: Sequence[Any], tokens: Sequence[Any], most: int, ahead: Sequence[Sequence[Any]] | None = None
) -> list[list[Any]]:
    """``result[t][w]``, f32: token row ``t`` times weight row ``w``, the same in every lane of the group.

    ``weights`` and ``tokens`` are addresses (i64) of rows. Up to ``most`` weight fragments of a lane are on their way
    at a time, and half as many of tokens: a wave of AMD that waits for a load waits for all that it made before.
    ``ahead`` is what :func:`load_ahead` gave for these weights and ``most``, if it was called. Every lane of the warp
    calls it. Reads the tokens with plain loads: what orders them, a wait, comes before it.
    """
    loaded = load_ahead(dot, weights, most) if ahead is None else list(ahead)
    window = max(1, len(loaded))
    held: list[list[Any]] = []
    several = max(1, min(window, most // (2 * len(tokens))))
    sums = [[fx.Float32(0.0) for _ in weights] for _ in tokens]
    for step in range(dot.steps):
        while len(loaded) < min(dot.steps, step + window):
            loaded.append([dot.load(row, len(loaded)) for row in weights])
        while len(held) < min(dot.steps, step + several):
            held.append([dot.load(token, len(held)) for token in tokens])
        columns = [fragment.to(fx.Float32) for fragment in loaded[step]]
        for t, fragment in enumerate(held[step]):
            values = fragment.to(fx.Float32)
            for w, column in enumerate(columns):
                for e in range(column.numel):
                    sums[t][w] = fx.fma(values[e], column[e], sums[t][w])
    return [[fold_lanes(value, GROUP, add) for value in one] for one in sums]


def of_lane(dot: Dot, values: Sequence[Any]) -> Any:
    """``values[lane]`` of the group; the last one in lanes that have none. By selects: it stays in registers."""
    chosen = values[-1]
    for i in range(len(values) - 1):
        chosen = (dot.lane == fx.Int32(i)).select(values[i], chosen)
    return chosen
