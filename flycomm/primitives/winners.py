# SPDX-License-Identifier: Apache-2.0
"""The best of a row, put together: every rank pushes what it has of them to where it stands in the whole list.

For ranks that know how many each has (:mod:`flycomm.primitives.threshold`): position ``i`` of the list is one rank's,
and its word (:mod:`flycomm.primitives.candidates`) goes to one place at whoever gets the row, so nothing has to be
merged. Lists are in the channel's first :data:`SLOTS` staging slots, behind the histograms. There is one buffer: what a
rank pushes for a row it pushes after it has taken a histogram of that row from everybody, each sent after its sender
had done with the list of the row before. Whoever takes a word sets it to 0, so that no place ever holds an old one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import staging_offset
from flycomm.primitives.access import load_relaxed, store_relaxed
from flycomm.primitives.block_scan import read, write
from flycomm.primitives.call import Call, fail
from flycomm.primitives.candidates import TAG_BITS, WORD_BYTES, missing, tag_of
from flycomm.primitives.digits import HISTOGRAM_BYTES
from flycomm.primitives.peers import peer_rank, segment
from flycomm.primitives.poll import until_whole

SLOTS = 4  # staging slots over which a list is spread: as many as two ranks have


class List:
    """Positions 0 … ``total`` of a row's list, those from ``begin`` up to ``end`` this rank's (u32). Trace-time only.

    ``counts``: how many each peer has (u32), in the order of ``segment(comm, 1)``, …; ``k``: class, at least all of
    them are kept that are below it; ``most``: the class that the channel has room for.
    """

    def __init__(self, call: Call, counts: Sequence[Any], own: Any, k: int, most: int):
        comm = call.comm
        self.k, self.most = k, most
        self.starts = []  # of peers, in the order of segments; then of this rank
        peers = [peer_rank(comm, j) for j in range(1, comm.world)]
        for mine in [*peers, comm.rank]:
            start = (comm.rank < mine).select(own, fx.Uint32(0))
            for peer, count in zip(peers, counts, strict=True):
                start = start + (peer < mine).select(count, fx.Uint32(0))
            self.starts.append(start)
        self.begin = self.starts.pop()
        self.end = _less(self.begin + own, k)
        total = own
        for count in counts:
            total = total + count
        self.total = _less(total, k)


def _less(value: Any, k: int) -> Any:
    return (value < fx.Uint32(k)).select(value, fx.Uint32(k))


def list_bytes(most: int) -> int:
    """Of a block's list of up to ``most`` words, in each of the slots over which it is spread."""
    return most // SLOTS * WORD_BYTES


def _place(call: Call, most: int, i: Any) -> Any:
    """Offset (i64) in a segment of position ``i`` (i32) of this block's list."""
    comm, each = call.comm, most // SLOTS
    slot = staging_offset(comm.blocks, comm.world, comm.capacity, 0, fx.Int64(i // fx.Int32(each)))
    row = fx.Int64(comm.blocks * HISTOGRAM_BYTES) + fx.Int64(call.block) * fx.Int64(list_bytes(most))
    return slot + row + fx.Int64(i % fx.Int32(each)) * fx.Int64(WORD_BYTES)


@flyc.jit
def push_winners(call: Call, winners: List, chosen: Any, threads: int, owner: Any = None) -> None:
    """Push this rank's part of the list, from ``chosen`` (shared, u64 ranks by position), to all, or to ``owner``.

    Every thread of the block calls it, after a block barrier. Waits for nothing; does nothing if not ``call.live``.
    """
    comm = call.comm
    if call.live:
        i = fx.Int32(fx.thread_idx.x) + fx.Int32(winners.begin)
        while i < fx.Int32(winners.end):
            word = (read(chosen, i, fx.Uint64) << fx.Uint64(TAG_BITS)) | fx.Uint64(tag_of(call.epoch))
            offset = _place(call, winners.most, i)
            for j in fx.range_constexpr(1, comm.world):
                if fx.const_expr(owner is None):
                    store_relaxed(segment(comm, j) + offset, word)
                else:
                    if peer_rank(comm, j) == owner:
                        store_relaxed(segment(comm, j) + offset, word)
            i = i + fx.Int32(threads)


@flyc.jit
def take_winners(call: Call, winners: List, chosen: Any, threads: int) -> None:
    """Take the peers' parts of the list to ``chosen``. Every thread of the block of who gets the row calls it.

    Waits for every word of them, up to ``comm.limit``; a wait that gives up poisons the block: after the next block
    barrier ``call.failed`` says so. Zeroes what it took; before the block sends anything of its next row in the same
    kernel, every thread calls :func:`~flycomm.primitives.access.land_own_stores`, and a block barrier follows.
    """
    comm = call.comm
    at = [fx.Int32(fx.thread_idx.x) + fx.Int32(n * threads) for n in range(max(1, winners.k // threads))]
    due = [
        (fx.Uint32(i) < winners.total) & ((fx.Uint32(i) < winners.begin) | (fx.Uint32(i) >= winners.end)) for i in at
    ]
    if call.live:
        base, tag = segment(comm, 0), tag_of(call.epoch)
        inside = [one.select(i, fx.Int32(0)) for one, i in zip(due, at, strict=True)]
        addresses = [base + _place(call, winners.most, i) for i in inside]
        words, reason = until_whole(
            lambda: [load_relaxed(address) for address in addresses], _due(due, tag), fx.Boolean(True), comm.limit, base
        )
        if reason != fx.Int32(0):
            _give_up(call, winners, words, at, due, tag, reason)
        for n in fx.range_constexpr(len(at)):
            if due[n]:
                store_relaxed(addresses[n], fx.Uint64(0))
                write(chosen, at[n], words[n] >> fx.Uint64(TAG_BITS))


def _due(due: Sequence[Any], tag: Any) -> Callable[[Sequence[Any]], Any]:
    """What is missing of the words that are due."""

    def rest(words: Sequence[Any]) -> Any:
        found = fx.Uint32(0)
        for one, word in zip(due, words, strict=True):
            found = found | one.select(missing([word], tag), fx.Uint32(0))
        return found

    return rest


@flyc.jit
def _give_up(call: Call, winners: List, words: Any, at: Any, due: Any, tag: Any, reason: Any) -> None:
    """Report the first word that is missing, and whose it is: of all that begin at or before it, the last."""
    place, seen = at[-1], words[-1]
    for n in fx.range_constexpr(len(at) - 1, -1, -1):
        here = due[n] & (missing([words[n]], tag) != fx.Uint32(0))
        place, seen = here.select(at[n], place), here.select(words[n], seen)
    peer, latest = fx.Int32(0), fx.Uint32(0)
    for j in fx.range_constexpr(1, call.comm.world):
        start = winners.starts[j - 1]
        later = (start <= fx.Uint32(place)) & (start >= latest)
        peer, latest = later.select(peer_rank(call.comm, j), peer), later.select(start, latest)
    fail(call, "candidate", peer, tag, fx.Uint32(seen) & fx.Uint32((1 << TAG_BITS) - 1), reason)
