# SPDX-License-Identifier: Apache-2.0
"""A token row that is the weighted sum of its experts' rows: where a mixture-of-experts layer meets its all-reduce.

Row ``i`` has ``topk`` experts, each with a weight. Their rows lie side by side, ``(rows, topk, hidden)``, or anywhere
in a matrix ``(permuted, hidden)``, with an index ``(rows, topk)`` that says where; below 0 the expert is another rank's
and adds nothing here. A shared expert's row may come to it. In f32, every operation rounded, in this order::

    total = 0;  for k in 0 … topk - 1:  total = total + weight[k] * expert[k];  total = total + shared

rounded once to the data type. So the bits are those of torch's ``*`` and ``+`` in f32, on every target and grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flydsl.expr as fx

from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from flycomm.primitives.access import load_element
from flycomm.primitives.row import Rows, load_places

MOST = 16  # experts of a row
_IN_FLIGHT = 32  # fragments of a thread, four registers each


@dataclass(frozen=True)
class Experts:
    """What is fixed when a kernel is compiled. ``topk``: 1 to :data:`MOST`; unrolled, so that loads travel together.

    ``weight``: "" for weights of the data type, or "f32". ``permuted``: there is an index. ``shared``: there is a row
    of a shared expert.
    """

    topk: int
    weight: str = ""
    permuted: bool = False
    shared: bool = False

    def check(self) -> None:
        """Raise :class:`UsageError` for a ``topk`` or a ``weight`` that there is not."""
        if not 1 <= self.topk <= MOST:
            raise UsageError(f"topk={self.topk} is not in 1..{MOST}; sum the rows of further experts before")
        if self.weight not in ("", "f32"):
            raise UsageError(f"weight={self.weight!r} is not '' or 'f32'; convert the weights")

    @property
    def name(self) -> str:
        """For the name of a specialization."""
        words = (f"top{self.topk}", self.weight and f"by_{self.weight}", "permuted" if self.permuted else "")
        return "_".join(filter(None, (*words, "shared" if self.shared else "")))


class Places(NamedTuple):
    """Addresses (i64), each 16-byte aligned, contiguous; what a row does not have may be 0.

    ``out``: the experts' rows, ``shared`` (rows, hidden), both of ``rows.element``; ``weights`` (rows, topk);
    ``index`` (rows, topk), i32. ``spare`` (rows, hidden) of ``rows.element``: its row is read instead of an expert's
    that is not here, and not used.
    """

    out: Any
    weights: Any
    index: Any
    shared: Any
    spare: Any


def load_experts(rows: Rows, experts: Experts, places: Places, row: Any) -> list[Any]:
    """This thread's fragments of the weighted sum of row ``row`` (i32), in ``rows.element``; past its end, anything.

    Called by any thread; plain loads, no order. An expert that is not here costs a load of a row that the kernel reads
    anyway: so all loads are issued at once, and none waits for a branch. Its weight is not looked at, NaN or not; a
    weight of 0 is multiplied like any other.
    """
    first = row * fx.Int32(experts.topk)
    weights = [_weight(rows, experts, places.weights, first + fx.Int32(k)) for k in range(experts.topk)]
    here, bases = _bases(rows, experts, places, row, first)
    totals = [fx.Vector.filled(rows.per, 0.0, fx.Float32) for _ in rows.places]
    several = max(1, _IN_FLIGHT // rows.each)
    for at in range(0, experts.topk, several):
        some = range(at, min(at + several, experts.topk))
        loaded = {k: load_places(rows, bases[k]) for k in some}
        for k in some:
            totals = _plus(totals, loaded[k], weights[k], here[k])
    if experts.shared:
        shared = load_places(rows, places.shared + fx.Int64(row) * rows.row_bytes)
        totals = [total + value.to(fx.Float32) for total, value in zip(totals, shared, strict=True)]
    return [total.to(rows.element) for total in totals]


def _weight(rows: Rows, experts: Experts, address: Any, index: Any) -> Any:
    kind = getattr(fx, REDUCIBLE[experts.weight].fx_name) if experts.weight else rows.element
    return load_element(address + fx.Int64(index) * fx.Int64(kind.width // 8), kind).to(fx.Float32)


def _bases(rows: Rows, experts: Experts, places: Places, row: Any, first: Any) -> tuple[list[Any], list[Any]]:
    """Of each expert, whether it is here (None: always), and where its row begins."""
    numbers = [first + fx.Int32(k) for k in range(experts.topk)]
    if not experts.permuted:
        return [None] * experts.topk, [places.out + fx.Int64(number) * rows.row_bytes for number in numbers]
    found = [load_element(places.index + fx.Int64(number) * fx.Int64(4), fx.Int32) for number in numbers]
    here = [index >= fx.Int32(0) for index in found]
    spare = places.spare + fx.Int64(row) * rows.row_bytes
    rows_at = [places.out + fx.Int64(index) * rows.row_bytes for index in found]
    return here, [there.select(base, spare) for there, base in zip(here, rows_at, strict=True)]


def _plus(totals: Sequence[Any], values: Sequence[Any], weight: Any, here: Any) -> list[Any]:
    factor = fx.Vector.filled(totals[0].numel, weight, fx.Float32)
    sums = [total + value.to(fx.Float32) * factor for total, value in zip(totals, values, strict=True)]
    return sums if here is None else [here.select(new, old) for new, old in zip(sums, totals, strict=True)]
