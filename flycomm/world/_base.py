# SPDX-License-Identifier: Apache-2.0
"""The interface of every world, and agreement built on its one primitive, an all-gather of bytes."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from flycomm import targets
from flycomm.errors import ClosedError, DisagreementError, UsageError

if TYPE_CHECKING:
    from flycomm.world._local import LocalWorlds

Device = Any  # an ordinal, "cuda:1", "cpu", a torch.device, or None for the default

_CALLS = ("exchange", "barrier", "all_of", "any_of", "agree", "vote")
_EXCERPT = 120  # characters of a value that a message shows


class _Local:
    """``World.local(size)`` makes virtual ranks, and ``world.local`` says whether a world is one of them."""

    @overload
    def __get__(self, world: None, owner: type[World]) -> Callable[..., LocalWorlds]: ...
    @overload
    def __get__(self, world: World, owner: type[World]) -> bool: ...
    def __get__(self, world: World | None, owner: type[World]) -> Callable[..., LocalWorlds] | bool:
        from flycomm.world._local import LocalWorld, LocalWorlds

        return LocalWorlds if world is None else isinstance(world, LocalWorld)


class World(ABC):
    """The ranks that communicate: ``rank`` of ``size``, each with one device.

    ``World.local(size, devices=None)`` makes ``size`` virtual ranks, threads of this process, by default dealt out over
    the devices (:class:`LocalWorlds`); ``world.local`` says whether a world is one of those.

    ``exchange``, ``barrier``, ``all_of``, ``any_of``, ``agree`` and ``vote`` are collective: all ranks make the same
    calls in the same order. Calls that do not match raise :class:`DisagreementError` on all ranks, and a rank that is
    gone raises :class:`CommError` on the others wherever the backend notices.
    """

    local = _Local()

    def __init__(self, rank: int, size: int, device: Device = None, local_rank: int | None = None):
        self.rank = rank
        self.size = size
        self._device = ordinal_of(device)
        self._local_rank = local_rank
        self._closed = False

    @property
    def device(self) -> int:
        """Ordinal of this rank's device.

        By default the devices are dealt out by local rank. Which target counts them is looked up at the first use, so
        that making a world opens no driver.
        """
        if self._device is None:
            runtime = targets.current().runtime
            if self._local_rank is None:
                self._device = runtime.current_device()
            else:
                self._device = self._local_rank % max(1, runtime.device_count())
        return self._device

    @abstractmethod
    def _gather(self, payload: bytes) -> list[bytes]:
        """All ranks' payloads, in rank order; lengths may differ."""

    def _call(self, call: str, payload: bytes = b"") -> list[bytes]:
        if self._closed:
            raise ClosedError(f"rank {self.rank} called {call} on a closed world; make a new one")
        received = self._gather(bytes([_CALLS.index(call)]) + payload)
        calls = [_CALLS[message[0]] for message in received]
        if any(other != call for other in calls):
            raise DisagreementError(
                f"ranks are in different calls: {_sides(calls)}; make the same calls in the same order on all ranks"
            )
        return [message[1:] for message in received]

    def exchange(self, payload: bytes) -> list[bytes]:
        """All-gather of small byte strings, whose lengths may differ; returns them in rank order."""
        return self._call("exchange", payload)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._call("barrier")

    def all_of(self, ok: bool) -> bool:
        """Whether ``ok`` holds on every rank."""
        return all(answer == b"1" for answer in self._call("all_of", b"1" if ok else b"0"))

    def any_of(self, flag: bool) -> bool:
        """Whether ``flag`` holds on at least one rank."""
        return any(answer == b"1" for answer in self._call("any_of", b"1" if flag else b"0"))

    def agree(self, value: bytes, what: str) -> None:
        """Raise :class:`DisagreementError`, which names both sides, on all ranks if ``value`` is not the same on all.

        ``what`` says what the value is; it has to agree too.
        """
        values = self._call("agree", what.encode() + b"\0" + value)
        if any(other != values[0] for other in values):
            shown = [_readable(other) for other in values]
            raise DisagreementError(f"ranks differ in {_sides(shown)}; pass the same on all ranks")

    def vote(self, ok: bool, reason: str) -> list[str]:
        """The reasons of the ranks that said no, as ``"rank 3: ..."``; empty if all said yes."""
        answers = self._call("vote", b"" if ok else b"-" + reason.encode())
        return [f"rank {rank}: {answer[1:].decode()}" for rank, answer in enumerate(answers) if answer]

    def close(self) -> None:
        """Collective where the backend's own clean-up is. Safe to call again."""
        self._closed = True

    # ------------------------------------------------------------------ the kinds of worlds

    @staticmethod
    def from_group(group: Any = None, cpu_group: Any = None, device: Device = None) -> World:
        """The ranks of a torch.distributed process group (default: all), of any backend.

        Bytes travel over ``cpu_group``, which has the same ranks, or over ``group`` where that has a CPU backend, else
        as device tensors. The default device is the group's bound one, or device ``LOCAL_RANK``, else global rank,
        modulo the device count.
        """
        from flycomm.world._torch import TorchWorld

        return TorchWorld(group, cpu_group, device)

    @staticmethod
    def from_mpi(comm: Any = None, device: Device = None) -> World:
        """The ranks of an mpi4py communicator (default: ``COMM_WORLD``), of which a duplicate is used. Collective.

        The default device is the rank among this machine's ranks, modulo the device count.
        """
        from flycomm.world._mpi import MpiWorld

        return MpiWorld(comm, device)

    @staticmethod
    def single(device: Device = None) -> World:
        """One rank; by default on the target's current device."""
        from flycomm.world._local import SingleWorld

        return SingleWorld(device)

    @staticmethod
    def auto(device: Device = None) -> World:
        """What this process was started as.

        With torch.distributed initialised, or under torchrun, :meth:`from_group` (and under torchrun the process group
        is made here if need be, and destroyed by :meth:`close`); under mpirun, :meth:`from_mpi`; else :meth:`single`.
        """
        if _distributed_initialized():
            return World.from_group(device=device)
        if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            from flycomm.world._torch import TorchWorld

            return TorchWorld.started_by_torchrun(device)
        if any(_int(os.environ.get(name)) > 1 for name in _MPI_SIZES):
            return World.from_mpi(device=device)
        return World.single(device)


_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # set by mpirun for each rank


def _distributed_initialized() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _int(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def ordinal_of(device: Device) -> int | None:
    """The ordinal that a user's device stands for; None if the default is to be found."""
    if device is None:
        return None
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return 0
    if kind.isdigit() and not index:
        return int(kind)
    if kind in ("cuda", "hip") and index.isdigit():
        return int(index)
    if kind in ("cuda", "hip") and not index:
        return targets.current().runtime.current_device()
    raise UsageError(f"device {device!r} is not understood; pass an ordinal, 'cuda:1', 'cpu' or a torch.device")


def _readable(value: bytes) -> str:
    what, _, data = value.partition(b"\0")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    return f"{what.decode()} {text if text.isprintable() and text else data.hex()}"


def _sides(values: list[str]) -> str:
    """``rank 0 has A, ranks 1 and 2 have B``; long values are cut to where they begin to differ."""
    same = next((i for i, letters in enumerate(zip(*values, strict=False)) if len(set(letters)) > 1), 0)
    start = max(0, same - _EXCERPT // 3)
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    sides = []
    for value, members in ranks.items():
        shown = value if len(value) <= _EXCERPT else f"{'…' if start else ''}{value[start : start + _EXCERPT]}…"
        who = f"rank {members[0]} has" if len(members) == 1 else f"ranks {', '.join(members)} have"
        sides.append(f"{who} {shown}")
    return ", ".join(sides)
