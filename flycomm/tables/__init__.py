# SPDX-License-Identifier: Apache-2.0
"""The dispatch tables: which protocol and grid carries a message of how many bytes, by architecture.

A table is a JSON file beside this one, or one that ``python -m flycomm tune`` wrote; all ranks of a communicator use
the same, which rank 0 reads. ``source`` says whether its rows were "measured" or "modelled", ``how`` by what.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from flycomm import env
from flycomm.channel import MAX_WORLD
from flycomm.errors import UsageError
from flycomm.geometry import RESIDENT_THREADS, Geometry, row_threads
from flycomm.tables import crossovers

OPS = ("all_reduce", "reduce_scatter", "all_gather")
FUSED = ("all_reduce_norm",)  # may have rows; what these do not take is done by separate kernels
PROTOCOLS = ("flags", "packets", "sentinel", "two_shot")
LOOPING = ("flags", "two_shot")  # one launch carries any size
MODES = ("any", "graph", "eager")
SHIPPED = "shipped"  # instead of a path: the table that came with flycomm
_SHIPPED = {"sm_80": "sm_90", "sm_100": "sm_90", "sm_103": "sm_90", "sm_120": "sm_90", "gfx1250": "gfx950"}
_ALIGNMENT = 4096  # bytes, of a capacity


def wire(protocol: str) -> str:
    """What a protocol sends; protocols that send alike share channels."""
    return "flags" if protocol == "two_shot" else protocol


def carries(protocol: str, op: str, reduction: str) -> bool:
    """Whether a protocol can carry an operation: a sentinel stands for a bit pattern that only sums can spare."""
    if protocol == "sentinel":
        return op != "all_gather" and reduction in ("sum", "avg")
    return protocol != "two_shot" or op == "all_reduce"


@dataclass(frozen=True)
class Row:
    """Messages of ``op`` up to ``largest`` bytes a rank (None: all longer ones) use ``protocol`` on this grid.

    The bytes of a rank are the message of an all-reduce, and a shard of the others. ``capacity``: bytes that a source
    may have in staging at a time; at least ``largest`` unless the protocol goes in pieces.
    """

    op: str
    worlds: tuple[int, int]  # first and last number of ranks
    mode: str  # of MODES: for captured calls, for eager ones, or for both
    largest: int | None
    protocol: str
    blocks: int
    threads: int
    capacity: int

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.blocks, self.threads)

    @property
    def counted(self) -> Geometry:
        """The grid with the threads that it takes of a budget by which a compute unit holds ``RESIDENT_THREADS``."""
        held = row_threads(self.threads) if self.op in FUSED else RESIDENT_THREADS
        return Geometry(self.blocks, self.threads * RESIDENT_THREADS // held)


@dataclass(frozen=True)
class Pays:
    """Up to ``rows`` token rows (0: never) one launch of a mono kernel beats separate ones, measured at this shape."""

    kernel: str  # "mono_ffn"
    worlds: tuple[int, int]  # first and last number of ranks
    hidden: int  # elements of a row
    inter: int  # elements of a row between the two products, of one rank
    rows: int


@dataclass(frozen=True)
class Table:
    """Rows in the order in which they are looked at. Made by :func:`parse`, which checks them."""

    arch: str
    source: str
    how: str
    rows: tuple[Row, ...]
    mono: tuple[Pays, ...] = ()
    indexer: tuple[crossovers.Crossover, ...] = ()

    def of(self, op: str, world: int, captured: bool) -> tuple[Row, ...]:
        """The rows for one operation, number of ranks and lane; the last takes every size."""
        modes = ("any", "graph" if captured else "eager")
        return tuple(
            row for row in self.rows if row.op == op and row.worlds[0] <= world <= row.worlds[1] and row.mode in modes
        )

    def pays_up_to(self, kernel: str, world: int, hidden: int, inter: int) -> int | None:
        """The rows up to which a mono kernel pays at this very shape; None if nobody has measured it."""
        found = (one for one in self.mono if one.worlds[0] <= world <= one.worlds[1])
        return next((one.rows for one in found if (one.kernel, one.hidden, one.inter) == (kernel, hidden, inter)), None)

    def digest(self) -> bytes:
        """Of everything that ranks must have alike to choose alike: 32 bytes."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def to_json(self) -> str:
        """What :func:`parse` reads, a row a line."""
        head: dict[str, Any] = {"arch": self.arch, "source": self.source, "how": self.how}
        if self.mono:
            head["mono"] = [asdict(one) for one in self.mono]
        rows = ",\n  ".join(json.dumps(asdict(row)) for row in self.rows)
        more = ",\n  ".join(json.dumps(asdict(one)) for one in self.indexer)
        indexer = f',\n "indexer": [\n  {more}\n ]' if more else ""
        return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]{indexer}\n}}\n'


def parse(text: str | bytes, name: str) -> Table:
    """The table in a file called ``name``; raises :class:`UsageError` with what is wrong in it."""
    try:
        data = json.loads(text)
        rows = tuple(_row(one) for one in data["rows"])
        mono = tuple(_pays(one) for one in data.get("mono", []))
        indexer = tuple(crossovers.parse(one) for one in data.get("indexer", ()))
        table = Table(str(data["arch"]), str(data["source"]), str(data["how"]), rows, mono, indexer)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{name} is not a dispatch table ({reason}); make one with python -m flycomm tune") from None
    for problem in _problems(table):
        raise UsageError(f"{name}: {problem}; make the table again with python -m flycomm tune")
    return table


def _row(data: dict[str, Any]) -> Row:
    first, last = data["worlds"]
    row = Row(**{**data, "worlds": (first, last)})
    _whole(first, last, row.blocks, row.threads, row.capacity, 1 if row.largest is None else row.largest)
    return row


def _pays(data: dict[str, Any]) -> Pays:
    first, last = data["worlds"]
    one = Pays(**{**data, "worlds": (first, last)})
    _whole(first, last, one.hidden, one.inter, one.rows)
    return one


def _whole(*numbers: Any) -> None:
    if wrong := [one for one in numbers if type(one) is not int]:
        raise TypeError(f"{wrong[0]!r} is not a whole number")


def _problems(table: Table) -> Iterable[str]:
    for row in table.rows:
        if not 1 <= row.worlds[0] <= row.worlds[1] <= MAX_WORLD:
            yield f"worlds of {row.worlds[0]} to {row.worlds[1]} ranks are not within 1..{MAX_WORLD}"
        elif row.op not in (*OPS, *FUSED) or row.protocol not in PROTOCOLS or row.mode not in MODES:
            yield f"{row.op}, {row.protocol} or {row.mode} is not a known operation, protocol or mode"
        elif not carries(row.protocol, row.op, "sum"):
            yield f"{row.protocol} cannot carry {row.op}"
        elif not (1 <= row.blocks <= 1024 and row.threads % 64 == 0 and 64 <= row.threads <= 1024):
            yield f"a grid of {row.blocks} × {row.threads} is not 1..1024 blocks of a multiple of 64 threads up to 1024"
        elif row.capacity <= 0 or row.capacity % _ALIGNMENT:
            yield f"a capacity of {row.capacity} bytes is not a multiple of {_ALIGNMENT}"
        elif row.op in FUSED and row.largest is None:
            yield f"{row.op} has no kernel for every size; give the largest that it takes"
        elif (row.protocol not in LOOPING or row.op in FUSED) and (row.largest or 0) > row.capacity:
            yield f"{row.protocol} carries {row.largest} bytes only with that capacity, not {row.capacity}"
    for one in table.mono:
        if not 1 <= one.worlds[0] <= one.worlds[1] <= MAX_WORLD or one.rows < 0 or min(one.hidden, one.inter) < 1:
            yield f"{one} is not within 1..{MAX_WORLD} ranks, with a shape of at least 1 and rows of at least 0"
    yield from crossovers.problems(table.indexer)
    for op in OPS:
        for world in range(1, MAX_WORLD + 1):
            for captured in (False, True):
                sizes = [row.largest for row in table.of(op, world, captured)]
                bounds = [size for size in sizes[:-1] if size is not None]
                complete = sizes[-1:] == [None] and len(bounds) + 1 == len(sizes)
                if not complete or bounds != sorted(set(bounds)) or any(size < 1 for size in bounds):
                    yield f"sizes of {op} with {world} ranks are {sizes}, not ascending from 1 with null at the end"


@cache
def shipped(arch: str) -> Table:
    """The table for a chip that came with flycomm: its own, or that of the nearest chip measured or modelled."""
    name = f"{_SHIPPED.get(arch, arch)}.json"
    folder = files(__name__)
    if not folder.joinpath(name).is_file():
        name = "gfx942.json" if arch.startswith("gfx") else "sm_90.json" if arch.startswith("sm_") else "host.json"
    return parse(folder.joinpath(name).read_text(), name)


def user_path(arch: str) -> Path:
    """Where ``python -m flycomm tune`` leaves what it measured for a chip, and where rank 0 looks first."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flycomm" / f"{arch}.json"


def place(arch: str, asked: str | None = None) -> Path | None:
    """The file of the table in force, None for the shipped one: ``asked``, else ``FLYCOMM_TABLE``, each a path or
    "shipped"; else what tune wrote for this chip; else the shipped one."""
    asked = asked or env.TABLE.get()
    if asked:
        return None if asked == SHIPPED else Path(asked)
    path = user_path(arch)
    return path if os.path.isfile(path) else None  # also where it may not be looked at


def load(arch: str, asked: str | None = None) -> Table:
    """The table in force; :func:`place` says where it lies.

    Raises :class:`UsageError` if the file cannot be read, is not a table, or is one for another chip.
    """
    path = place(arch, asked)
    if path is None:
        return shipped(arch)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"the dispatch table {path} cannot be read ({error.strerror}); name a file that python -m flycomm tune "
            "wrote, or shipped"
        ) from None
    table = parse(text, str(path))
    if table.arch != arch:
        raise UsageError(f"{path} is for {table.arch}, this is {arch}; make a table here with python -m flycomm tune")
    return table
