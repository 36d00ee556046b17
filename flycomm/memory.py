# SPDX-License-Identifier: Apache-2.0
"""Memory that every rank of a world can write: allocate, fill, export, exchange, open, probe, ready; and close."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from flycomm.errors import ClosedError, CommError, PeerAccessError, TargetError, UsageError
from flycomm.targets import Target
from flycomm.world import World

_PAGE = 4096  # bytes; the least that is allocated
_PLACE = struct.Struct("<Qi")  # address, device: what virtual ranks exchange where nothing can be opened


class SymmetricBuffer:
    """``num_bytes`` on each rank of ``world``, mapped on all of them. Collective to make and to close.

    Every u32 of the memory is ``fill_word`` before any other rank has its address. ``name`` is for messages. When the
    constructor returns, every rank has written to every peer and has seen what the peers wrote, and all ranks know it.
    It raises on all ranks alike, and then nothing is left behind:

    - :class:`DisagreementError`: the arguments are not the same on all ranks;
    - :class:`UsageError`: ``num_bytes`` or ``fill_word`` is out of range;
    - :class:`TargetError`: a rank cannot allocate;
    - :class:`PeerAccessError`: a rank cannot map, or cannot use, a peer's memory; the message has every rank's reason.

    Where a rank is gone there is no agreement and the exchange's :class:`CommError` comes through; see :meth:`close`.
    """

    def __init__(self, world: World, target: Target, num_bytes: int, *, fill_word: int = 0, name: str = ""):
        self._usable = False
        self.world = world
        self.target = target
        self.num_bytes = num_bytes
        self.name = name
        self._fill_word = fill_word
        self._local = 0
        self._opened: list[int] = []  # peers' memory to unmap
        self._addresses: tuple[int, ...] = ()
        arguments = {"name": name, "num_bytes": num_bytes, "fill_word": fill_word, "target": target.name}
        world.agree(json.dumps(arguments).encode(), "symmetric buffer")
        if num_bytes <= 0 or not 0 <= fill_word < 1 << 32:
            raise UsageError(
                f"a symmetric buffer of {num_bytes} bytes filled with {fill_word:#x} was asked for; "
                "ask for at least 1 byte and a 32-bit word"
            )
        # All of an agreed allocation is used: by the probe, a word for each rank.
        self._num_words = -(-max(num_bytes, 4 * world.size) // _PAGE) * _PAGE // 4
        try:
            self._allocate()
            self._open_peers()
            self._probe()
        except BaseException:
            self._abandon()
            raise
        self._usable = True

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address of every rank's memory, in rank order, as this rank's device sees it."""
        self._check_open()
        return self._addresses

    @property
    def local_address(self) -> int:
        """Address of this rank's own memory, aligned to 4096 bytes."""
        self._check_open()
        return self._local

    def close(self) -> None:
        """Collective: drain this rank's device, meet, unmap the peers, meet, free. Safe to call again.

        If a rank is gone, its :class:`CommError` is raised after the peers are unmapped, and this rank's own memory is
        kept until the process ends: a kernel of a rank that is not gone may still write to it.
        """
        if not self._usable:
            return
        self._usable = False
        try:
            self.target.runtime.synchronize(self.world.device)
        finally:  # also when this rank's device has failed: the others are waiting
            try:
                self.world.barrier()
                problems = self._release()
            except CommError:
                self._abandon()
                raise
        if problems:
            raise TargetError(f"{self} was not released: {'; '.join(problems)}")

    def __str__(self) -> str:
        return f"symmetric buffer {self.name!r} of {self.num_bytes} bytes"

    def __del__(self) -> None:
        if getattr(self, "_usable", False):
            warnings.warn(f"{self} was not closed: its memory is kept", ResourceWarning, stacklevel=2)

    # ------------------------------------------------------------------ making one

    def _allocate(self) -> None:
        memory, device, problems = self.target.memory, self.world.device, list[str]()
        with _noted(problems):
            self._local = memory.allocate(self._num_words * 4, device)
            memory.fill(self._local, self._fill_word, self._num_words, device)
        self._agree(problems, TargetError, "cannot be allocated on all ranks")

    def _open_peers(self) -> None:
        memory, device = self.target.memory, self.world.device
        by_handle = memory.opens_own_exports or not self.world.local
        offer, problems = b"", list[str]()
        with _noted(problems):
            offer = memory.export(self._local, device) if by_handle else _PLACE.pack(self._local, device)
        offers = self.world.exchange(offer)
        addresses = []
        for rank, offered in enumerate(offers):
            with _noted(problems, f"memory of rank {rank}: "):
                if rank == self.world.rank:
                    addresses.append(self._local)
                elif offered and by_handle:
                    addresses.append(memory.open(offered, device))
                    self._opened.append(addresses[-1])
                elif offered:
                    address, peer_device = _PLACE.unpack(offered)
                    memory.enable_peer(device, peer_device)
                    addresses.append(address)
        self._agree(problems, PeerAccessError, "cannot be mapped by all ranks")
        with _noted(problems):
            memory.export_done(self._local, device)
        self._agree(problems, TargetError, "keeps a name that others can see")
        self._addresses = tuple(addresses)

    def _probe(self) -> None:
        """Every rank writes a word to every peer, finds what the peers wrote, and puts its fill back."""
        memory, device, me, problems = self.target.memory, self.world.device, self.world.rank, list[str]()
        peers = [rank for rank in range(self.world.size) if rank != me]
        for peer in peers:
            with _noted(problems, f"memory of rank {peer}: "):
                memory.write(self._addresses[peer] + 4 * me, self._probe_word(me, peer), device)
        self._agree(problems, PeerAccessError, "cannot be written by all ranks")
        for peer in peers:
            with _noted(problems, f"memory of rank {peer}: "):
                arrived = memory.read(self._local + 4 * peer, 4, device)
                if arrived != self._probe_word(peer, me):
                    problems.append(f"a word that rank {peer} wrote has not arrived (0x{arrived[::-1].hex()} is there)")
                back = memory.read(self._addresses[peer] + 4 * me, 4, device)
                if back != self._probe_word(me, peer):
                    problems.append(f"a word written to rank {peer} reads as 0x{back[::-1].hex()}")
        self._agree(problems, PeerAccessError, "cannot be used by all ranks")
        with _noted(problems):
            memory.fill(self._local, self._fill_word, self.world.size, device)
        self._agree(problems, TargetError, "cannot be filled on all ranks")

    def _probe_word(self, writer: int, owner: int) -> bytes:
        return struct.pack("<I", ~self._fill_word & 0xFFFFFFFF ^ (writer << 12 | owner))

    def _agree(self, problems: list[str], error: type[CommError], what: str) -> None:
        """Meet; if a rank has problems, undo everything together and raise ``error`` on all ranks."""
        reasons = self.world.vote(not problems, "; ".join(problems))
        if reasons:
            reasons += self._release()
            raise error(f"{self} {what}: {'; '.join(reasons)}")

    # ------------------------------------------------------------------ taking it down

    def _release(self) -> list[str]:
        """Collective: unmap the peers, meet, free; returns what went wrong on the way."""
        problems = self._unmap()
        self.world.barrier()
        local, self._local = self._local, 0
        if local:
            with _noted(problems):
                self.target.memory.free(local, self.world.device)
        return problems

    def _unmap(self) -> list[str]:
        problems: list[str] = []
        while self._opened:
            with _noted(problems):
                self.target.memory.close(self._opened.pop(), self.world.device)
        return problems

    def _abandon(self) -> None:
        """Without the others: unmap the peers and let no name be seen, but keep the memory that they may write to."""
        self._unmap()
        if self._local:
            with suppress(TargetError):  # what brought us here matters more
                self.target.memory.export_done(self._local, self.world.device)

    def _check_open(self) -> None:
        if not self._usable:
            raise ClosedError(f"{self} is closed; make a new one")


@contextmanager
def _noted(problems: list[str], prefix: str = "") -> Iterator[None]:
    """Keep a target's error for the vote: a rank that raised alone would leave the others waiting.

    So with a :class:`UsageError`: a rank's environment may have a value that the others' do not have.
    """
    try:
        yield
    except (TargetError, UsageError) as error:
        problems.append(f"{prefix}{error}")
