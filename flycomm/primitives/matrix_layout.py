# SPDX-License-Identifier: Apache-2.0
"""Which lane of a group holds which part of a tile product: :mod:`flycomm.primitives.matrix`.

==================== ======================= ====================================
                     ``WARP`` (32, 8)        ``WAVE`` (64, 16)
==================== ======================= ====================================
B row and quarter    lane // 4, lane % 4     lane % 16, lane // 16
A rows, same quarter lane // 4, and 8 more   lane % 16
D[i] of a lane, row  lane // 4 + 8 (i // 2)  4 (lane // 16) + i
D[i], column         2 (lane % 4) + i % 2    lane % 16
==================== ======================= ====================================

``WARP`` is that of NVIDIA's ``mma.sync`` m16n8, ``WAVE`` that of AMD's MFMA 16×16.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES

ROWS = 16  # of A and D
QUARTERS = 4
SEGMENT = QUARTERS * FRAGMENT_BYTES  # bytes of k that a lane's fragments cover together with its neighbours'
RESULTS = 4  # elements of D in a lane


@dataclass(frozen=True)
class Layout:
    """Which lane of a group holds what. Methods are for kernels and take the lane within the group (i32)."""

    lanes: int
    columns: int

    @property
    def parts(self) -> int:
        """Rows of A that a lane holds a quarter of."""
        return ROWS // self.columns

    def lane(self) -> Any:
        """This thread's lane of its group."""
        return fx.Int32(fx.thread_idx.x) % fx.Int32(self.lanes)

    def column(self, lane: Any) -> Any:
        """The row of B that a lane holds a quarter of; of A too, and ``columns`` more for every further part."""
        return lane // fx.Int32(QUARTERS) if self == WARP else lane % fx.Int32(self.columns)

    def quarter(self, lane: Any) -> Any:
        return lane % fx.Int32(QUARTERS) if self == WARP else lane // fx.Int32(self.columns)

    def holder(self, column: Any, quarter: Any) -> Any:
        """The lane that holds this quarter of this row of B."""
        if self == WARP:
            return column * fx.Int32(QUARTERS) + quarter
        return quarter * fx.Int32(self.columns) + column

    @property
    def by_row(self) -> tuple[tuple[int, ...], ...]:
        """The lane's results, grouped by their row: which ``i`` of D[i]. Rows rise."""
        return ((0, 1), (2, 3)) if self == WARP else ((0,), (1,), (2,), (3,))

    @property
    def by_column(self) -> tuple[tuple[int, ...], ...]:
        """The same by column."""
        return ((0, 2), (1, 3)) if self == WARP else ((0, 1, 2, 3),)

    def rows_of(self, lane: Any) -> list[Any]:
        """The row (i32) of each group of :attr:`by_row`."""
        if self == WARP:
            return [self.column(lane) + fx.Int32(8 * part) for part in range(2)]
        return [self.quarter(lane) * fx.Int32(RESULTS) + fx.Int32(i) for i in range(RESULTS)]

    def columns_of(self, lane: Any) -> list[Any]:
        """The column (i32) of each group of :attr:`by_column`."""
        if self == WARP:
            return [self.quarter(lane) * fx.Int32(2) + fx.Int32(i) for i in range(2)]
        return [self.column(lane)]

    @property
    def row_width(self) -> int:
        """So many neighbouring lanes have the same rows of D, and all of its columns between them."""
        return self.lanes // (ROWS // len(self.by_row))

    @property
    def column_distances(self) -> tuple[int, ...]:
        """Lanes so far apart (for ``shuffle_xor``, the farthest first) have the same columns, and all rows."""
        return (16, 8, 4) if self == WARP else (32, 16)

    def owned(self, lane: Any) -> Any:
        """Which of the columns (i32) of four tiles is this lane's, if sums over all rows are dealt out by halves over
        :attr:`column_distances`: one for each lane."""
        if self == WAVE:
            return lane
        eight, four = lane // fx.Int32(8), lane // fx.Int32(4) % fx.Int32(2)
        return eight * fx.Int32(8) + lane % fx.Int32(4) * fx.Int32(2) + four


WARP = Layout(32, 8)
WAVE = Layout(64, 16)


def layout() -> Layout:
    """The layout of the target that is compiled for: by the width of its warps."""
    return WAVE if fx.gpu.num_warp_threads() == WAVE.lanes else WARP
