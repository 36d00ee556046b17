# SPDX-License-Identifier: Apache-2.0
"""Candidates of a top-k that is spread over ranks, as tagged keys: pushed to whoever merges them, and taken.

A *word* is 8 bytes that say by themselves that they have arrived: a rank (:mod:`flycomm.primitives.rank`) of 56 bits,
32 of ordered score and 24 of global id, and below it a tag of 8 bits, ``1 + epoch % 255``, never 0. Row ``b`` is block
``b``'s, whose epoch counts only the launches that have the row; a nomination fills the row's whole slot, ``k`` words a
source; and a slot that a later call may pass over is set to zero by its reader. So where a word is looked for stands
what came two of the block's calls earlier, or nothing, until it is there: 8 bits are enough, and the buffer, of two, is
by the whole epoch. The proof is in the docs' memory model of the top-k exchange.

Verbs, in this order, by every thread of a block: ``begin``; :mod:`~flycomm.primitives.nominate`;
:func:`push_candidates`; ``packet.meet``; :func:`take_candidates`, mostly by way of :mod:`~flycomm.primitives.merge`; a
block barrier; ``finish``. A block that takes nothing in a call waits for tokens (:mod:`~flycomm.primitives.token`).
"""

from collections.abc import Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.primitives.access import load_pair, store_pair, store_relaxed
from flycomm.primitives.call import Call, fail, staging
from flycomm.primitives.peers import peer_rank, segment
from flycomm.primitives.poll import until_whole

TAGS = 255
TAG_BITS = 8
ID_BITS = 24  # of a global id
WORD_BYTES = 8
PAIR_BYTES = 2 * WORD_BYTES  # what a thread pushes and takes at a time


def tag_of(epoch: Any) -> Any:
    """The tag (u32, 1 … 255) of a call of this epoch (u32)."""
    return fx.Uint32(1) + epoch % fx.Uint32(TAGS)


def place(call: Call, source: Any, pair: Any, k: int) -> Any:
    """Offset (i64) in a segment of pair ``pair`` (i32) of what rank ``source`` (i32) nominates for this block's row."""
    slot = staging(call, source) + fx.Int64(call.block) * fx.Int64(k * WORD_BYTES)
    return slot + fx.Int64(pair) * fx.Int64(PAIR_BYTES)


@flyc.jit
def push_candidates(
    call: Call, ranks: Sequence[Any], pair: Any, k: int, peers: Sequence[int], owner: Any = None
) -> None:
    """Push two ranks (u64; 0 for none) as pair ``pair`` (i32) of this row to the ranks ``(rank + j) % world`` of
    ``peers``, or of these to ``owner`` (i32) only.

    Called by one thread, once a pair and call; together the calls fill the slot of ``k`` (compile-time) words at each
    rank that takes it, 0 included: a reader waits for every word. Orders nothing else, waits for nothing; writes
    nothing if the channel is poisoned.
    """
    if call.live:
        comm = call.comm
        tag = tag_of(call.epoch)
        low, high = [(rank << fx.Uint64(TAG_BITS)) | fx.Uint64(tag) for rank in ranks]
        offset = place(call, comm.rank, pair, k)
        for j in peers:
            if fx.const_expr(owner is None):
                store_pair(segment(comm, j) + offset, low, high)
            else:
                if peer_rank(comm, j) == owner:
                    store_pair(segment(comm, j) + offset, low, high)


@flyc.jit
def push_words(
    call: Call, ranks: Sequence[Any], words: Sequence[Any], k: int, peers: Sequence[int], owner: Any = None
) -> None:
    """:func:`push_candidates` by the word: ``ranks[i]`` as word ``words[i]`` (i32) of the row, two of them a pair."""
    if call.live:
        comm = call.comm
        tag = fx.Uint64(tag_of(call.epoch))
        slot = place(call, comm.rank, fx.Int32(0), k)
        offsets = [slot + fx.Int64(word) * fx.Int64(WORD_BYTES) for word in words]
        for j in peers:
            for rank, offset in zip(ranks, offsets, strict=True):
                word = (rank << fx.Uint64(TAG_BITS)) | tag
                if fx.const_expr(owner is None):
                    store_relaxed(segment(comm, j) + offset, word)
                else:
                    if peer_rank(comm, j) == owner:
                        store_relaxed(segment(comm, j) + offset, word)


def missing(words: Sequence[Any], tag: Any) -> Any:
    """Zero (u32) when every word (u64) has the tag (u32)."""
    rest = fx.Uint32(0)
    for word in words:
        rest = rest | ((fx.Uint32(word) & fx.Uint32((1 << TAG_BITS) - 1)) ^ tag)
    return rest


def _load(addresses: Sequence[Any]) -> list[Any]:
    return [word for address in addresses for word in load_pair(address)]


@flyc.jit
def take_candidates(call: Call, pairs: Sequence[Any], sources: Sequence[Any], due: Any, k: int, reset: bool) -> Any:
    """The ranks (u64, two a pair) that ``sources[i]`` (i32, not this rank) pushed here as ``pairs[i]`` (i32).

    Called by one thread after ``packet.meet``, each pair by one thread; nothing is loaded unless ``due`` (bool). Waits
    for every word, up to ``comm.limit``; a wait that gives up poisons the block: after the next block barrier
    ``call.failed`` says so. What did not come is 0. ``reset`` (compile-time): zero the words taken, in case that their
    place is passed over in a later call; the end of the kernel is what orders that before the peers' next push.
    """
    comm = call.comm
    base = segment(comm, 0)
    tag = tag_of(call.epoch)
    ranks = [fx.Uint64(0) for _ in range(2 * len(pairs))]
    if due & call.live:
        addresses = [base + place(call, source, pair, k) for pair, source in zip(pairs, sources, strict=True)]
        words, reason = until_whole(
            lambda: _load(addresses), lambda some: missing(some, tag), fx.Boolean(True), comm.limit, base
        )
        if reason != fx.Int32(0):
            _give_up(call, words, sources, tag, reason)
        if fx.const_expr(reset):
            for address in addresses:
                store_pair(address, fx.Uint64(0), fx.Uint64(0))
        arrived = [missing([word], tag) == fx.Uint32(0) for word in words]
        ranks = [
            here.select(word >> fx.Uint64(TAG_BITS), fx.Uint64(0)) for here, word in zip(arrived, words, strict=True)
        ]
    return ranks


@flyc.jit
def _give_up(call: Call, words: Sequence[Any], sources: Sequence[Any], tag: Any, reason: Any) -> None:
    """Report the first word that is missing: whose it is, its tag, and the one that stood there."""
    mask = fx.Uint32((1 << TAG_BITS) - 1)
    peer, seen = sources[-1], fx.Uint32(words[-1]) & mask
    for i in fx.range_constexpr(len(words) - 1, -1, -1):
        here = missing([words[i]], tag) != fx.Uint32(0)
        peer = here.select(sources[i // 2], peer)
        seen = here.select(fx.Uint32(words[i]) & mask, seen)
    fail(call, "candidate", peer, tag, seen, reason)
