# SPDX-License-Identifier: Apache-2.0
"""Takes of a whole row: the fragments of peers are polled together, so that their loads travel together."""

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES, PACKETS_BYTES
from flycomm.primitives import fragment, packet, sentinel, trace
from flycomm.primitives.call import Call, staging
from flycomm.primitives.peers import in_rank_order, peer_rank, segment
from flycomm.primitives.poll import until_arrived
from flycomm.primitives.reduce import rounded_sum
from flycomm.primitives.row import Rows

_IN_FLIGHT = 32768  # registers of a block for what its threads poll together: half of those there are
_MOST = 128  # of a thread
_NAN = 0x7FC07FC07FC07FC0  # of every type that is summed


def take_row(rows: Rows, call: Call, verbs: Any, row: Any, own: Sequence[Any]) -> list[Any]:
    """The sums in rank order of this thread's fragments of row ``row``, rounded; past the row's end, anything.

    ``verbs`` is the module ``fragment``, ``packet`` or ``sentinel``, whose ``take`` has the contract; ``own`` is what
    :func:`post_row` posted. Packets and sentinels are polled for several fragments at a time: the loads of a poll
    travel together.
    """
    slots = rows.slots(row)
    if verbs is fragment or call.comm.world == 1:
        return [verbs.take(call, value, slot).to(value.dtype) for value, slot in zip(own, slots, strict=True)]
    words = 8 if verbs is packet else 4  # registers of a fragment
    budget = min(_MOST, _IN_FLIGHT // rows.threads)
    several = max(1, budget // (words * (call.comm.world - 1)))
    totals: list[Any] = []
    for at in range(0, rows.each, several):
        some = slice(at, at + several)
        totals += _take_marked(call, verbs, own[some], slots[some], rows.inside[some])
    return totals


def _take_marked(call: Call, verbs: Any, own: Sequence[Any], slots: Sequence[Any], inside: Sequence[Any]) -> list[Any]:
    comm, n = call.comm, len(own)
    if verbs is packet:
        each, num_bytes, buffers, phase = 4, PACKETS_BYTES, 2, "packet"
    else:
        each, num_bytes, buffers, phase = 2, FRAGMENT_BYTES, 3, "sentinel"
    bases = [segment(comm, 0) + staging(call, peer_rank(comm, j), buffers) for j in range(1, comm.world)]
    addresses = [base + fx.Int64(slot) * fx.Int64(num_bytes) for base in bases for slot in slots]

    def missing(words: Sequence[Any]) -> Any:
        rest = fx.Uint32(0)
        for i in range(0, len(words), each):
            part = words[i : i + each]
            lacks = packet._missing(part, call.epoch) if verbs is packet else sentinel._missing(part)
            rest = rest | inside[i // each % n].select(lacks, fx.Uint32(0))
        return rest

    trace.begin(call, "take", slots[0])
    words, ok = until_arrived(call, phase, lambda: verbs._load(addresses), missing)
    trace.end(call, "take")

    def theirs(j: int, k: int) -> Any:
        first = ((j - 1) * n + k) * each
        part = words[first : first + each]
        if verbs is packet:
            part = [fx.Uint32(word & fx.Uint64(0xFFFFFFFF)) for word in part]
        if j == 1:  # one term that is NaN is enough
            part = [ok.select(word, type(word)(_NAN & (1 << type(word).width) - 1)) for word in part]
        return fx.Vector.from_elements(part, type(part[0])).bitcast(own[k].dtype)

    totals = []
    for k in range(n):
        terms = [own[k], *(theirs(j, k) for j in range(1, comm.world))]
        if comm.world > 2:  # of two any may come first: 0 + a + b is 0 + b + a, NaN payloads aside
            terms = in_rank_order(comm, terms[0], terms[1:])
        totals.append(rounded_sum(terms))
    return totals
