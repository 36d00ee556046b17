# SPDX-License-Identifier: Apache-2.0
"""Cached index keys of one request, page by page, as operands of a tile product.

A *step* is what a group of lanes loads at a time: as many keys as it has lanes, four tiles of columns. Lane ``l``
*owns* key ``Layout.owned`` of the step: its score ends up there. Keys at and beyond the request's length are never
read, nor the entries of the block table for pages that begin there: such lanes load the last key there is.

========= ============================ ================================================= ==================
format    a token's key, 128 elements  its scale                                          queries
========= ============================ ================================================= ==================
bf16      256 bytes                    none                                               bf16
e4m3fn    128 bytes                    f32, or none                                       e4m3fn
e4m3fnuz  128 bytes                    f32, or none                                       e4m3fnuz
e2m1      64 bytes, low nibble first   4 ue8m0 bytes, one for each 32 elements            bf16
========= ============================ ================================================= ==================

Token ``s`` of a page has its key ``s * token_stride`` after the page's begin and its scale ``scale_offset + 4 * s``
after it: planes of their own (token_stride 128, scale_offset ``page * 128``) and any other strides. Page ``i`` of this
rank's share is entry ``page_first + i * page_step`` of the request's row of the block table, and lies ``page_stride``
bytes times that entry after the cache's begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives import matrix
from flycomm.primitives.access import load_element, load_fragment
from flycomm.primitives.decode import e2m1_fragments, ue8m0_value
from flycomm.primitives.quant import E4M3FN, E4M3FNUZ

WIDTH = 128  # elements of a key
TILES = 4  # of a step


@dataclass(frozen=True)
class Format:
    """How keys lie in the cache, and what they and queries are in a tile product. Bytes are those of 128 elements."""

    element: matrix.Element
    key_bytes: int
    query_bytes: int
    scale: str  # "none", "token" (f32) or "group" (ue8m0)

    @property
    def segments(self) -> int:
        """Of a query, and of a key in registers."""
        return self.query_bytes // matrix.SEGMENT

    @property
    def loads(self) -> int:
        """Fragments of a key that a lane loads."""
        return self.key_bytes // matrix.SEGMENT

    def query_place(self, segment: Any, quarter: Any) -> Any:
        """Where (bytes) in a query lies what belongs to a key's ``quarter`` of ``segment``; all i32."""
        if self.scale == "group":  # a quarter of packed keys is a whole group of 32 elements
            return quarter * fx.Int32(self.query_bytes // matrix.QUARTERS) + segment * fx.Int32(FRAGMENT_BYTES)
        return quarter * fx.Int32(FRAGMENT_BYTES) + segment * fx.Int32(matrix.SEGMENT)


FORMATS = {
    "bf16": Format(matrix.BF16, 2 * WIDTH, 2 * WIDTH, "none"),
    "e4m3fn": Format(E4M3FN, WIDTH, WIDTH, "token"),
    "e4m3fnuz": Format(E4M3FNUZ, WIDTH, WIDTH, "token"),
    "e2m1": Format(matrix.BF16, WIDTH // 2, 2 * WIDTH, "group"),
}


@dataclass(frozen=True)
class Cache:
    """Where keys lie. Trace-time only: strides and addresses are i64, ``page`` (tokens) is an int, others i32."""

    fmt: Format
    address: Any
    page: int
    page_stride: Any
    token_stride: Any
    scale_offset: Any
    page_first: Any
    page_step: Any


class Keys:
    """The first ``length`` (i32, at least 1) keys of the request whose block table lies at ``table`` (i64).

    ``form``: a :class:`matrix.Layout`, or one that says the same of another step."""

    tiles = TILES

    def __init__(self, cache: Cache, form: Any, table: Any, length: Any):
        self.cache, self.fmt, self.form, self.table = cache, cache.fmt, form, table
        self.last = length - fx.Int32(1)
        self.lane = form.lane()
        self.column, self.quarter = form.column(self.lane), form.quarter(self.lane)
        self.whole = cache.page % form.lanes == 0  # a step lies in one page

    def pages(self, first: Any, scaled: bool) -> list[Any]:
        """The numbers (i32) of the pages that :meth:`load` reads for the step at key ``first``, which exists."""
        keys = [first] if self.whole else [self._key(first, tile) for tile in range(self.tiles + scaled)]
        pages = [key // fx.Int32(self.cache.page) for key in keys]
        entries = [self.cache.page_first + page * self.cache.page_step for page in pages]
        return [load_element(self.table + fx.Int64(entry) * fx.Int64(4), fx.Int32) for entry in entries]

    def _key(self, first: Any, tile: int) -> Any:
        """Whose quarter this lane loads for ``tile``, or, for ``tiles``, the one that it owns."""
        place = self.form.owned(self.lane) if tile == self.tiles else fx.Int32(tile * self.form.columns) + self.column
        key = first + place
        return (key < self.last).select(key, self.last)

    def load(self, pages: Sequence[Any], first: Any, scaled: bool) -> list[list[Any]]:
        """What the step at key ``first`` (i32) needs of memory: for each tile :meth:`load_tile`; then owned scales.

        ``pages``: by :meth:`pages`. Plain loads, and nothing waits for them: whoever wrote the keys ran before this.
        """
        loaded = [self.load_tile(pages, first, tile) for tile in range(self.tiles)]
        if scaled and self.fmt.scale == "token":
            loaded.append([self._scale(*self._place(pages, first, self.tiles), fx.Float32)])
        return loaded

    def load_tile(self, pages: Sequence[Any], first: Any, tile: int) -> list[Any]:
        """This lane's quarters of its key of ``tile``, as they lie in the cache, and the code of its group scales."""
        page, token = self._place(pages, first, tile)
        offset = token * fx.Int32(self.cache.token_stride) + self.quarter * fx.Int32(FRAGMENT_BYTES)
        begin = page + fx.Int64(offset)
        loaded = [load_fragment(begin + fx.Int64(i * matrix.SEGMENT), fx.Uint32) for i in range(self.fmt.loads)]
        return [*loaded, self._scale(page, token, fx.Uint32)] if self.fmt.scale == "group" else loaded

    def _place(self, pages: Sequence[Any], first: Any, tile: int) -> tuple[Any, Any]:
        """Address of the page, and the key's number in it."""
        number = pages[0] if self.whole else pages[tile]
        address = self.cache.address + fx.Int64(number) * self.cache.page_stride
        size = fx.Int32(self.cache.page)
        key = self._key(first, tile)
        return address, key - first // size * size if self.whole else key % size

    def _scale(self, page: Any, token: Any, dtype: Any) -> Any:
        return load_element(page + self.cache.scale_offset + fx.Int64(token * fx.Int32(4)), dtype)

    def operands(self, loaded: Sequence[Any]) -> list[Any]:
        """Of a loaded tile, one fragment a segment: the B of :func:`flycomm.primitives.matrix.multiply`."""
        fragments = list(loaded[: self.fmt.loads])
        if self.fmt.scale == "group":
            code = loaded[-1] >> (fx.Uint32(self.quarter) * fx.Uint32(8))
            fragments = e2m1_fragments(fragments[0], ue8m0_value(code & fx.Uint32(0xFF)))
        return [matrix.prepare(self.fmt.element, one) for one in fragments]
