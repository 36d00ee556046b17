# SPDX-License-Identifier: Apache-2.0
"""The collectives of one communicator: from tensors to one launch, or to the group's own backend."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flycomm import dispatch, fallback, kernels
from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from flycomm.layout import Key, Routes, key_of
from flycomm.primitives.peers import addresses_type
from flycomm.session import Session
from flycomm.tables import OPS, Row
from flycomm.validate import ALIGNMENT, as_usable, check_apart, check_gathered, check_like, check_scattered, usable

NAMES = {getattr(torch, entry.torch_name): entry.name for entry in REDUCIBLE.values()}
_FALLBACK = "fallback"
_MOST = 2**31 - 16  # elements that a kernel can count: whole fragments of them, in signed words of 32 bits
_LAUNCHES = 4096  # kept ready, of as many different sizes
_UNKNOWN = object()


@dataclass(frozen=True)
class _Call:
    """What fixes a launch: everything about a call that is not an address or a stream."""

    op: str
    reduction: str
    dtype: torch.dtype
    count: int  # elements of a rank: of the message, or of a shard
    channel: int
    captured: bool
    detail: int = 0  # all_gather: elements in a row; reduce_scatter: whether chunks are aligned


class Collectives:
    """All-reduce, reduce-scatter, all-gather and barrier over one session's channels."""

    def __init__(self, session: Session, fall_back_to: str, max_bytes: int, routes: Routes):
        self._session = session
        self._fall_back_to = fall_back_to
        self._max_bytes = max_bytes
        self._routes = routes
        self._launches: dict[tuple[Any, ...], Any] = {}

    # ------------------------------------------------------------------ the calls

    def all_reduce(self, x: torch.Tensor, op: str, out: torch.Tensor | None, channel: int) -> Any:
        session = self._session
        session.enter()
        session.check_device(x)
        if session.debug:
            session.roll_call("all_reduce", op, tuple(x.shape), str(x.dtype))
        if out is not None:
            check_like(x, out, x.shape)
            check_apart(x, out, own=0)
        captured = session.is_capturing()
        launch = self._launch("all_reduce", op, x.dtype, x.numel(), channel, captured)
        if launch is None:
            return self._fall_back("all_reduce", x, op, out)
        source = as_usable(x)
        result = out if out is not None and usable(out) else torch.empty_like(source)
        self._run(launch, source, result, channel, captured)
        return result if out is None or result is out else out.copy_(result)

    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor | None, channel: int) -> Any:
        session = self._session
        session.enter()
        session.check_device(x)
        size = session.world.size
        shape = check_scattered(x, size)
        if session.debug:
            session.roll_call("reduce_scatter", op, tuple(x.shape), str(x.dtype))
        count = x.numel() // size
        if out is not None:
            check_like(x, out, shape)
            check_apart(x, out, own=session.world.rank * count)
        captured = session.is_capturing()
        aligned = count * x.element_size() % ALIGNMENT == 0
        launch = self._launch("reduce_scatter", op, x.dtype, count, channel, captured, int(aligned))
        if launch is None:
            return self._fall_back("reduce_scatter", x, op, out)
        source = as_usable(x)
        result = out if out is not None and usable(out) else x.new_empty(shape)
        self._run(launch, source, result, channel, captured)
        return result if out is None or result is out else out.copy_(result)

    def all_gather(self, x: torch.Tensor, dim: int, out: torch.Tensor | None, channel: int) -> Any:
        session = self._session
        session.enter()
        session.check_device(x)
        shape, last = check_gathered(x, session.world.size, dim)
        if session.debug:
            session.roll_call("all_gather", f"dim {dim}", tuple(x.shape), str(x.dtype))
        if out is not None:
            check_like(x, out, shape)
            check_apart(out, x, own=None if last else session.world.rank * x.numel())
        captured = session.is_capturing()
        width = x.shape[-1] if last else x.numel()
        launch = self._launch("all_gather", "", x.dtype, x.numel(), channel, captured, width)
        if launch is None:
            return self._fall_back("all_gather", x, "", out, last)
        source = as_usable(x)
        result = out if out is not None and usable(out) else x.new_empty(shape)
        self._run(launch, source, result, channel, captured)
        return result if out is None or result is out else out.copy_(result)

    def all_reduce_symmetric(
        self,
        x: torch.Tensor,
        addresses: tuple[int, ...],
        op: str,
        out: torch.Tensor | None,
        in_place: bool,
        channel: int,
    ) -> torch.Tensor:
        """``x`` lies at ``addresses`` on every rank, this one's first; the result goes to ``out``, or into ``x``."""
        session = self._session
        session.enter()
        session.roll_call("all_reduce of symmetric memory", op, tuple(x.shape), str(x.dtype))
        captured = session.is_capturing()
        key = (addresses, op, x.dtype, x.numel(), channel, captured, in_place)  # addresses come back after close()
        launch = self.kept(key)
        if launch is None:
            launch = self.keep(key, self._make_symmetric(x, addresses, op, in_place, channel, captured))
        result = x if in_place else out if out is not None and usable(out) else torch.empty_like(x)
        self._run(launch, x, result, channel, captured)
        return result if out is None or result is out else out.copy_(result)

    def barrier(self, channel: int) -> None:
        session = self._session
        session.enter()
        session.roll_call("barrier", "", (), "")
        if session.channels is None:
            fallback.barrier(session.group())
            return
        captured, stream = session.is_capturing(), session.stream()
        peers = session.peers(Key(channel, captured, "barrier"))
        session.claim(channel, captured, stream)
        handle = session.load(kernels.rank_barrier(session.world.size))
        handle(peers, tag_of("barrier", "", 0, channel), peers.state.value, stream)
        session.target.raise_pending()

    # ------------------------------------------------------------------ plans

    def plan(self, op: str, reduction: str, dtype: torch.dtype, num_bytes: int, captured: bool) -> dispatch.Plan:
        """What a call would use; the same on all ranks."""
        if self._session.channels is None:
            return dispatch.Plan(_FALLBACK, reason="ranks cannot map each other's memory")
        name = str(dtype).removeprefix("torch.")
        plan = dispatch.select(op, reduction, captured, num_bytes, name, self._max_bytes, self._routes)
        count = num_bytes // (1 if op == OPS[-1] else dtype.itemsize)  # a gather's elements may be single bytes
        if plan.row is not None and count > _MOST:
            reason = f"{count} elements are over the {_MOST} of a launch; split the tensor"
            return dispatch.Plan(_FALLBACK, reason=reason)
        return plan

    def needed(self, dtypes: Sequence[torch.dtype], num_bytes: Sequence[int]) -> list[kernels.Specialization]:
        """Kernels for these dtypes and bytes of a rank (default: all), in an order that is the same on all ranks."""
        if self._session.channels is None:
            return []
        world = self._session.world.size
        routes = {key: rows for key, rows in self._routes.items() if key[0] in OPS}  # a fused kernel depends on shapes
        wanted = dict.fromkeys(
            (op, row.protocol, row.geometry)
            for (op, _), rows in routes.items()
            for row in (_row_for(rows, size) for size in num_bytes)
        ) or dict.fromkeys((op, row.protocol, row.geometry) for (op, _), rows in routes.items() for row in rows)
        reducible = [NAMES[dtype] for dtype in (dtypes or tuple(NAMES)) if dtype in NAMES]
        found = [kernels.rank_barrier(world), kernels.put_signal(world), kernels.wait_signal(world)]
        for op, protocol, grid in wanted:
            if op == OPS[-1]:
                found.append(kernels.all_gather(world, grid, protocol))
            else:
                build = kernels.all_reduce if op == OPS[0] else kernels.reduce_scatter
                found += [build(world, dtype, grid, protocol) for dtype in reducible]
        return found

    # ------------------------------------------------------------------ launches

    def _launch(
        self, op: str, reduction: str, dtype: torch.dtype, count: int, channel: int, captured: bool, detail: int = 0
    ) -> Any:
        """What launches such a call, ``launch(source, out, stream)``; None if the group's own backend has to do it."""
        key = (op, reduction, dtype, count, channel, captured, detail)
        try:
            launch = self._launches.get(key, _UNKNOWN)
        except TypeError:  # of what cannot be a key
            raise UsageError(
                f"op={reduction!r} is not a name, or channel={channel!r} not a number; pass these"
            ) from None
        return self.keep(key, self._make(_Call(*key))) if launch is _UNKNOWN else launch

    def kept(self, key: tuple[Any, ...]) -> Any:
        """A launch made ready before, or None."""
        return self._launches.get(key)

    def keep(self, key: tuple[Any, ...], launch: Any) -> Any:
        """Keep a launch ready for further calls of its kind; returns it."""
        if len(self._launches) >= _LAUNCHES:
            self._launches.clear()
        self._launches[key] = launch
        return launch

    def forget(self) -> None:
        """Make every launch ready anew at its next call: other kernels are to be launched."""
        self._launches.clear()

    def _make(self, call: _Call) -> Any:
        num_bytes = call.count * call.dtype.itemsize
        plan = self.plan(call.op, call.reduction, call.dtype, num_bytes, call.captured)
        if plan.row is None:
            return None
        if not call.count:
            return _nothing
        session = self._session
        peers = session.peers(key_of(plan.row, call.channel, call.captured))
        specialization, extra = self._kernel(call, plan.row)
        handle = session.load(specialization)
        tag = tag_of(call.op + call.reduction, str(call.dtype), call.count, call.channel)
        return kernels.bind(handle, (peers, tag, 0, 0, *extra, 0), varying=(2, 3, 4 + len(extra)))

    def _make_symmetric(
        self, x: torch.Tensor, addresses: tuple[int, ...], op: str, in_place: bool, channel: int, captured: bool
    ) -> Any:
        plan = self.plan("all_reduce", op, x.dtype, 0, captured)
        if plan.row is None:
            raise UsageError(f"all_reduce of symmetric memory: {plan.reason}")
        if x.numel() > _MOST:
            raise UsageError(f"{x.numel()} elements are over the {_MOST} of a launch; reduce parts of the tensor apart")
        row = self._routes["all_reduce", captured][-1]  # of a wire with flags: the barriers are calls of its channel
        session = self._session
        world = session.world.size
        peers = session.peers(key_of(row, channel, captured))
        specialization = kernels.all_reduce_symmetric(world, NAMES[x.dtype], row.geometry, op, in_place)
        handle = session.load(specialization)
        memory = addresses_type(world)(**{f"address{j}": address for j, address in enumerate(addresses)})
        tag = tag_of(f"symmetric {in_place} {op}", str(x.dtype), x.numel(), channel)
        bound = kernels.bind(handle, (peers, tag, memory, 0, x.numel(), 0), varying=(3, 5))
        return lambda source, out, stream: bound(out, stream)

    def _kernel(self, call: _Call, row: Row) -> tuple[kernels.Specialization, tuple[int, ...]]:
        """The kernel of a call, and its arguments between the addresses and the stream."""
        world, grid, protocol = self._session.world.size, row.geometry, row.protocol
        if call.op == "all_gather":
            num_bytes, width = call.count * call.dtype.itemsize, call.detail * call.dtype.itemsize
            unit = next(unit for unit in kernels.GATHER_UNITS if width % unit == 0)
            item = min(unit, 4)
            return kernels.all_gather(world, grid, protocol, unit), (num_bytes // item, width // item)
        name = NAMES[call.dtype]
        if call.op == "reduce_scatter":
            return kernels.reduce_scatter(world, name, grid, protocol, call.reduction, bool(call.detail)), (call.count,)
        return kernels.all_reduce(world, name, grid, protocol, call.reduction), (call.count,)

    def _run(self, launch: Any, source: torch.Tensor, out: torch.Tensor, channel: int, captured: bool) -> None:
        session = self._session
        stream = session.stream()
        session.claim(channel, captured, stream)
        launch(source.data_ptr(), out.data_ptr(), stream)
        session.target.raise_pending()

    def _fall_back(self, op: str, x: torch.Tensor, reduction: str, out: torch.Tensor | None, last: bool = False) -> Any:
        if self._fall_back_to == "none":
            return None
        session = self._session
        count = x.numel() // (session.world.size if op == "reduce_scatter" else 1)
        plan = self.plan(op, reduction, x.dtype, count * x.element_size(), session.is_capturing())
        group = session.group()
        if self._fall_back_to == "error" or group is None:
            raise UsageError(f"{op}: {plan.reason}")
        session.say_once(f"flycomm falls back to the group's own backend: {plan.reason}")
        if op == "all_gather":
            return fallback.all_gather(group, x, last, out)
        call = fallback.all_reduce if op == "all_reduce" else fallback.reduce_scatter
        return call(group, x, reduction, out)


def _nothing(source: int, out: int, stream: int) -> None:
    """Zero elements on every rank: nothing is launched, nothing counts."""


def _row_for(rows: Sequence[Row], num_bytes: int) -> Row:
    return next(row for row in rows if row.largest is None or num_bytes <= row.largest)


@lru_cache(maxsize=4096)
def tag_of(op: str, dtype: str, count: int, channel: int) -> int:
    """31 bits that peers compare: what a call must have alike on all ranks."""
    return zlib.crc32(f"{op} {dtype} {count} {channel}".encode()) & 0x7FFFFFFF
