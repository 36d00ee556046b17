# SPDX-License-Identifier: Apache-2.0
"""Worlds inside one process: virtual ranks as threads, and the world of one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from flycomm import targets
from flycomm.errors import CommError, UsageError
from flycomm.world._base import Device, World

T = TypeVar("T")

LIMIT_S = 300.0  # how long a rank waits for the others, and how long a run lasts, unless told
_GRACE_S = 5.0  # for ranks to leave once a run is broken


class SingleWorld(World):
    """One rank; see :meth:`World.single`."""

    def __init__(self, device: Device):
        super().__init__(0, 1, device)

    def _gather(self, payload: bytes) -> list[bytes]:
        return [payload]


class LocalWorld(World):
    """One virtual rank of :class:`LocalWorlds`."""

    def __init__(self, meeting: _Meeting, rank: int, device: Device):
        super().__init__(rank, meeting.size, device, local_rank=rank)
        self._meeting = meeting

    def _gather(self, payload: bytes) -> list[bytes]:
        return self._meeting.gather(self.rank, payload)


class _Meeting:
    """Where the threads of one local world meet, round by round. Once broken, every rank that comes raises."""

    def __init__(self, size: int):
        self.size = size
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        with self._changed:
            self._payloads: dict[int, bytes] = {}
            self._results: list[bytes] = []
            self._round = 0
            self._left: set[int] = set()
            self._broken = ""

    def gather(self, rank: int, payload: bytes) -> list[bytes]:
        with self._changed:
            self._raise_if_broken()
            if rank in self._payloads:
                raise UsageError(f"rank {rank} is used by two threads at once; use each rank in one thread")
            mine = self._round
            self._payloads[rank] = payload
            if len(self._payloads) == self.size:
                self._results = [self._payloads[one] for one in range(self.size)]
                self._payloads = {}
                self._round += 1
                self._changed.notify_all()
                return list(self._results)
            if not self._changed.wait_for(lambda: self._round != mine or self._cannot_complete(), LIMIT_S):
                self._break(f"rank {rank} waited {LIMIT_S:g} s for {_ranks(self._missing())}")
            # A round that is complete counts, also when a rank failed since. The next one needs this rank, so the
            # results are still its.
            if self._round != mine:
                return list(self._results)
            self._raise_if_broken()
            raise CommError(f"{_ranks(self._missing() & self._left)} returned while rank {rank} waits for it")

    def leave(self, rank: int) -> None:
        """The rank's function has returned: nobody need wait for it."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        with self._changed:
            self._break(reason)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._changed.notify_all()

    def _missing(self) -> set[int]:
        return set(range(self.size)) - self._payloads.keys()

    def _cannot_complete(self) -> bool:
        return bool(self._broken or self._missing() & self._left)

    def _raise_if_broken(self) -> None:
        if self._broken:
            raise CommError(self._broken)


class LocalWorlds(Sequence[World]):
    """The virtual ranks of ``World.local``, in rank order. Use each in a thread of its own, or :meth:`run` all."""

    def __init__(self, size: int, devices: Sequence[Device] | None = None):
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"a world of {size!r} ranks was asked for; ask for at least 1")
        if devices is not None and len(devices) != size:
            raise UsageError(f"{len(devices)} devices were given for {size} ranks; give one a rank, repeats allowed")
        if size > 1:
            targets.expect_virtual_ranks()
        self._meeting = _Meeting(size)
        self._worlds = [LocalWorld(self._meeting, rank, devices[rank] if devices else None) for rank in range(size)]
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._worlds)

    @overload
    def __getitem__(self, index: int) -> World: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[World]: ...
    def __getitem__(self, index: int | slice) -> World | Sequence[World]:
        return self._worlds[index]

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = LIMIT_S) -> list[T]:
        """``fn(world, *args)`` on every rank, each in a thread named ``rank<r>``; returns the results in rank order.

        On a GPU target the thread's current device is the rank's, and its current stream one of the rank's own.

        When a rank raises, the others' exchanges raise :class:`CommError`, and the exception that came first is raised
        here. When ranks have not returned after ``timeout`` seconds, :class:`CommError` names them; their threads
        cannot be killed, and until they end no other run starts.
        """
        if busy := self._busy():
            raise CommError(f"{_ranks(busy)} of an earlier run has not returned; make another world")
        self._meeting.reset()
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def work(world: World) -> None:
            try:
                with targets.current().runtime.rank_scope(world.device):
                    results[world.rank] = fn(world, *args)
            except BaseException as error:  # raised again by the thread that called run
                error.add_note(f"raised on rank {world.rank}")
                failures.append(error)
                self._meeting.fail(f"rank {world.rank} failed: {type(error).__name__}: {error}")
            else:
                self._meeting.leave(world.rank)

        self._threads = [
            threading.Thread(target=work, args=(world,), name=f"rank{world.rank}", daemon=True)
            for world in self._worlds
        ]
        try:
            for thread in self._threads:
                thread.start()
            late = self._join(timeout)
        except BaseException as error:
            self._meeting.fail(f"the run was interrupted: {type(error).__name__}")
            raise
        stuck = late
        if late:
            self._meeting.fail(f"{_ranks(late)} did not return within {timeout:g} s")
            stuck = self._join(_GRACE_S)
        if not stuck:
            self._meeting.reset()
        if failures:
            raise failures[0]
        if late:
            after = f"{_ranks(stuck)} is still in there" if stuck else "they have left since"
            raise CommError(
                f"{_ranks(late)} did not return within {timeout:g} s ({after}); allow more, or find the hang"
            )
        return [results[rank] for rank in range(len(self))]

    def close(self) -> None:
        for world in self._worlds:
            world.close()

    def _busy(self) -> list[int]:
        return [rank for rank, thread in enumerate(self._threads) if thread.is_alive()]

    def _join(self, timeout: float) -> list[int]:
        """Wait for all threads; the ranks of those that have not ended in time."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self._busy()


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
