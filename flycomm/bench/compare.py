# SPDX-License-Identifier: Apache-2.0
"""Times of one run beside those of another, case by case and contender by contender: ``--compare``.

A difference counts where it is more than the noise: the spreads of both over their repeats, added, and at least 3 %,
by which two runs of the same code of others differed on two H200s (docs/facts.md has the machine). Where a row has no
spread, 5 %. A verdict is for people: it never decides an exit code, a missing row does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flycomm import _console
from flycomm.bench import labels
from flycomm.bench.rows import Row

_LEAST_NOISE = 0.03  # of the old time
_UNKNOWN_NOISE = 0.05
_NAMED = 3  # missing rows that are named; the others are counted


class Key(NamedTuple):
    """What two times must have alike to be compared. ``contender`` is flycomm, a baseline, or a floor."""

    what: str
    reduction: str | None
    target: str
    world: int
    bytes: int
    dtype: str | None
    mode: str
    replay_on: str | None
    straggler_us: float | None
    rows: int | None
    hidden: int | None
    intermediate: int | None
    projection: int | None
    grid: str | None
    columns: int | None
    k: int | None
    exchange_mode: str | None
    algo: str | None
    given: str | None
    kind: str | None
    context: int | None
    requests: int | None
    query_rows: int | None
    heads: int | None
    contender: str

    def __str__(self) -> str:
        row = self._asdict()
        words = [
            labels.collective(row),
            self.contender,
            labels.size(row),
            self.dtype,
            labels.ranks(row),
            labels.how(row),
        ]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class Time:
    us: float
    spread_us: float | None
    device: str


@dataclass(frozen=True)
class Line:
    key: Key
    old: Time
    new: Time

    @property
    def noise_us(self) -> float:
        if self.old.spread_us is None or self.new.spread_us is None:
            return _UNKNOWN_NOISE * self.old.us
        return max(self.old.spread_us + self.new.spread_us, _LEAST_NOISE * self.old.us)

    @property
    def verdict(self) -> str:
        difference = self.new.us - self.old.us
        if abs(difference) <= self.noise_us:
            return "same"
        return "slower" if difference > 0 else "faster"


@dataclass(frozen=True)
class Comparison:
    """``missing``: a sentence for each side that lacks rows."""

    lines: tuple[Line, ...]
    missing: tuple[str, ...]


def compare(old: Sequence[Row], new: Sequence[Row], whole: bool) -> Comparison:
    """``new`` beside ``old``; of two rows with one key the later counts, and one without a time is as good as none.

    ``whole``: all of ``old`` must be in ``new``. Otherwise only what ``new`` was about: a run of two sizes is not
    asked for the others, but it is for a baseline whose row it has without a time.
    """
    before, after = times(old), times(new)
    asked = [{key[field] for key, _ in _keyed(new)} for field in range(len(Key._fields))]
    expected = {key for key in before if whole or all(map(set.__contains__, asked, key))}
    sides = (
        ("this run", [key for key in before if key in expected and key not in after]),
        ("the old file", [key for key in after if key not in before]),
    )
    return Comparison(
        tuple(Line(key, before[key], after[key]) for key in before if key in after),
        tuple(_sentence(side, keys) for side, keys in sides if keys),
    )


def times(rows: Iterable[Row]) -> dict[Key, Time]:
    """Every time in the rows by its key."""
    latest = dict(_keyed(rows))
    return {key: time for key, time in latest.items() if time is not None}


def _keyed(rows: Iterable[Row]) -> Iterable[tuple[Key, Time | None]]:
    for row in rows:
        floor = row["what"] == "floor"
        yield _entry(row, row["protocol"] if floor else "flycomm", row["us"], row["spread_us"])
        if row["baseline"] is not None:
            yield _entry(row, row["baseline"], row["baseline_us"], row["baseline_spread_us"])


def _entry(row: Row, contender: str, us: float | None, spread_us: float | None) -> tuple[Key, Time | None]:
    usual = "sum" if row["what"] in ("all_reduce", "reduce_scatter") else None  # files from before it was a key
    fields = {name: row[name] for name in Key._fields if name not in ("reduction", "contender")}
    key = Key(reduction=row["reduction"] or usual, contender=contender, **fields)
    return key, None if us is None else Time(us, spread_us, row["device"])


def _sentence(side: str, keys: Sequence[Key]) -> str:
    named = "; ".join(map(str, keys[:_NAMED])) + (f"; and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
    times = "1 time is" if len(keys) == 1 else f"{len(keys)} times are"
    return f"{times} missing in {side}, so nothing can be said of: {named}"


def show(comparison: Comparison, name: str) -> None:
    """Write the tables, and what is missing, to standard output."""
    for title, columns, lines in tables(comparison, name):
        _console.table(title, columns, lines)
    for sentence in comparison.missing:
        _console.write(sentence)


def tables(comparison: Comparison, name: str) -> list[tuple[str, list[str], list[list[str]]]]:
    """``(title, columns, lines)``, one for each collective, world and way of timing."""
    groups: dict[str, list[Line]] = {}
    for line in comparison.lines:
        groups.setdefault(_title(line, name), []).append(line)
    columns = ["bytes", "dtype", "contender", "old µs", "new µs", "noise", "new / old", "verdict"]
    return [(title, columns, list(map(_cells, lines))) for title, lines in groups.items()]


def _title(line: Line, name: str) -> str:
    row = line.key._asdict()
    devices = line.new.device if line.old.device == line.new.device else f"{line.old.device} then {line.new.device}"
    where = f"{labels.ranks(row)} on {line.key.target} ({devices})"
    return f"{labels.collective(row)} against {name}: {where}, {labels.how(row)}"


def _cells(line: Line) -> list[str]:
    size = labels.size(line.key._asdict()) or "–"
    numbers = [f"{line.old.us:.2f}", f"{line.new.us:.2f}", f"± {line.noise_us:.2f}", f"{line.new.us / line.old.us:.3f}"]
    return [size, line.key.dtype or "–", line.key.contender, *numbers, line.verdict]
