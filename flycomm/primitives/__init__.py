# SPDX-License-Identifier: Apache-2.0
"""FlyDSL components for kernels that talk to other GPUs. Import as ``import flycomm.primitives as fc``.

========== =====================================================================================================
peers      ``peers_type(world, blocks)``: the kernel argument; ``segment``, ``peer_rank``
call       ``begin``, ``finish``: enter and leave one call of a channel
fragment   ``post``, ``take``, ``all_reduce_fragment``: push 16 bytes to every peer, sum in rank order (flags)
packet     the same verbs, with ``meet`` for ``arrive`` and ``wait``: data with its epoch, for small messages
sentinel   the same, for float sums of medium size: what has not arrived is a word that is never sent
tensor     ``load_slot``, ``store_slot``: fragments of a flat tensor of any length
barrier    ``arrive``, ``wait``, ``barrier``: all ranks, block-paired
signal     ``signal.signal``, ``signal.wait``: one word to one peer, order and scope explicit
access     typed global memory by address; every order and scope by name
reduce     ``sum_in_rank_order``
========== =====================================================================================================

A docstring is a contract: who calls it, what order it makes, what it does not do. Names a target overrides live in
``rocm.py`` and ``cuda.py``; the portable form stays callable as ``name.portable``.
"""

from flycomm.primitives import access, packet, sentinel, signal
from flycomm.primitives.barrier import arrive, barrier, wait
from flycomm.primitives.call import Call, begin, finish
from flycomm.primitives.fragment import all_reduce_fragment, post, take
from flycomm.primitives.peers import peer_rank, peers_type, segment
from flycomm.primitives.reduce import sum_in_rank_order

__all__ = [
    "Call",
    "access",
    "all_reduce_fragment",
    "arrive",
    "barrier",
    "begin",
    "finish",
    "packet",
    "peer_rank",
    "peers_type",
    "post",
    "segment",
    "sentinel",
    "signal",
    "sum_in_rank_order",
    "take",
    "wait",
]
