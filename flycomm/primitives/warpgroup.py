# SPDX-License-Identifier: Apache-2.0
"""A tile product of e4m3 by four warps: ``D[64 rows × columns] = A[64 × 128] · B[columns × 128]ᵀ``.

The form of sm_90's ``wgmma``: A (keys) is in registers, B (queries) in shared memory, both of rows of 128 bytes. Warp
``w`` of the group has the rows 16w to 16w + 15 of A and D. In a warp:

==================== ==========================================================================
A, ``a[half][s]``    row lane // 4 + 8 half; of its segment ``s`` of 64 bytes the quarter lane % 4: 16 bytes, one load
D[i] of a lane       row lane // 4 + 8 (i // 2 % 2), column 8 (i // 4) + 2 (lane % 4) + i % 2
B                    byte :func:`place` of shared memory has the word of a row, segment, quarter and number
==================== ==========================================================================

A sum does not care which k comes when, so A stays as it was loaded and B is arranged to match: each step of 32 takes
two words of a lane's quarter. Rows of B are 128 bytes apart, and their fragments swapped by the row's last three bits
("128-byte swizzle"): no two lanes of a read or of a store meet in a bank.

An element of D depends neither on its row and column nor on the others. **How sums are rounded is the target's**: in
f32 the portable way; by sm_90's units, which align 32 products and the sum so far to the largest and keep 13 bits
after its first, see :data:`flycomm.primitives.index_score.DEVIATION`. NaN comes out as NaN.
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives._override import overridable
from flycomm.primitives.block_scan import read
from flycomm.primitives.decode import fp8_values
from flycomm.primitives.matrix_layout import QUARTERS, SEGMENT
from flycomm.primitives.quant import E4M3FN

THREADS = 128  # of a group
ROWS = 64  # of A and D
ROW_BYTES = 128
SEGMENTS = ROW_BYTES // SEGMENT
HALVES = 2  # rows of A that a lane has parts of, 8 apart
UNIT = 8  # columns are a multiple of it
MOST_COLUMNS = 128  # in one product: its results are half as many registers
ALIGNMENT = 1024  # of B's first byte: eight rows
_WORDS = FRAGMENT_BYTES // 4


def place(row: Any, segment: Any, quarter: Any, word: Any) -> Any:
    """Where (bytes) in B's shared memory lies ``word`` of a row's ``quarter`` of ``segment``: i32s, or integers."""
    fragment = segment * _WORDS + word  # the words of one number, of all quarters, lie side by side
    return row * ROW_BYTES + (fragment ^ row % UNIT) * FRAGMENT_BYTES + quarter * 4


def row_of(thread: Any) -> Any:
    """The first row (i32) of A that a thread (i32) of the group has parts of; the other is 8 more."""
    return thread // fx.Int32(32) * fx.Int32(16) + thread % fx.Int32(32) // fx.Int32(QUARTERS)


@overridable
def publish_operand() -> None:
    """Every thread calls it after it stored its part of B, before the block barrier ahead of :func:`multiply_group`."""


@overridable
def multiply_group(b: Any, first: Any, columns: int, a: Sequence[Sequence[Any]]) -> list[Any]:
    """This lane's ``columns // 2`` elements (f32) of D. Every lane of the group calls it, all at one place.

    ``b``: a pointer to B in shared memory, aligned to :data:`ALIGNMENT`; ``first``: the row of it (i32, a multiple of
    8) that is column 0; ``columns``: a multiple of 8, at most :data:`MOST_COLUMNS`; ``a``: fragments as loaded.
    """
    total = [fx.Float32(0.0) for _ in range(columns // 2)]
    for segment in range(SEGMENTS):
        total = _segment(b, first, columns, segment, total, [half[segment] for half in a])
    return total


@flyc.jit
def _segment(b: Any, first: Any, columns: int, segment: int, total: Any, parts: Any) -> Any:
    quarter = fx.Int32(0)
    while quarter < fx.Int32(QUARTERS):
        total = _quarter(b, first, columns, segment, total, parts, quarter)
        quarter = quarter + fx.Int32(1)
    return total


def _quarter(b: Any, first: Any, columns: int, segment: int, total: Any, parts: Any, quarter: Any) -> list[Any]:
    lane = fx.Int32(fx.thread_idx.x) % fx.Int32(32)
    holder = lane // fx.Int32(QUARTERS) * fx.Int32(QUARTERS) + quarter
    rows = []
    for part in parts:
        words = [fx.Uint32(fx.gpu.shuffle_idx(part[i], holder, 32)) for i in range(_WORDS)]
        rows.append(fp8_values(fx.Vector.from_elements(words, fx.Uint32), E4M3FN))
    total = list(total)
    for pair in range(columns // UNIT * 2):
        column = fx.Int32(pair // 2 * UNIT + pair % 2) + lane % fx.Int32(QUARTERS) * fx.Int32(2)
        places = [place(first + column, fx.Int32(segment), quarter, fx.Int32(word)) for word in range(_WORDS)]
        words = [read(b, one // fx.Int32(4), fx.Uint32) for one in places]
        values = fp8_values(fx.Vector.from_elements(words, fx.Uint32), E4M3FN)
        for half in range(HALVES):
            i = pair // 2 * 4 + 2 * half + pair % 2
            for left, right in zip(rows[half], values, strict=True):
                total[i] = fx.fma(left, right, total[i])
    return total
