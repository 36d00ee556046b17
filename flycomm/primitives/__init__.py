# SPDX-License-Identifier: Apache-2.0
"""FlyDSL components for kernels that talk to other GPUs. Import as ``import flycomm.primitives as fc``.

========== =====================================================================================================
peers      ``peers_type(world, blocks)``: the kernel argument; ``segment``, ``peer_rank``
call       ``begin``, ``finish``: enter and leave one call of a channel; ``again``: one more in the same kernel;
           ``launch_order.in_turn``: a kernel that is there before the one ahead of it has ended, and waits
fragment   ``post``, ``post_to``, ``take``, ``collect``, ``all_reduce_fragment``: push 16 bytes to every peer, or to
           one; what came, in rank order, or its sum (flags)
packet     the same verbs, with ``meet`` for ``arrive`` and ``wait``: data with its epoch, for small messages
sentinel   the same, for float sums of medium size: what has not arrived is a word that is never sent
tensor     ``load_slot``, ``store_slot``: fragments of a flat tensor of any length; ``Share``: a thread's part of one
row        a block's row of a matrix, held in registers; ``take_row``: its sum over the ranks; ``row_loop``: several
           rows of a block, one after the other
experts    ``load_experts``: such a row as the weighted sum of its experts' rows, wherever they lie
norm       ``rms_norm_row``: RMSNorm of such a row, the same bits whatever the batch and the grid
quant      f32 to e4m3, with a scale that is static, a row's, or a group's
ready      ``mark``, ``wait``: blocks of one device tell each other that a row is done; no reset between launches
schedule   ``deal``, ``task_table``, ``walk``: which block does which tile of which stage, the same on all ranks
dot        a few token rows times weight rows, by groups of 32 lanes; ``load_ahead``: weights before a wait;
           ``block_product``, ``block_rounds``: up to 48 token rows, by a block and matrix instructions
matrix     a tile product by the target's matrix instructions, or by fma; ``decode``: narrow floats to wider ones;
           ``warpgroup``: a larger one, of e4m3; ``index_score``: an indexer's scores of keys, left in registers
activation ``silu``, ``sigmoid``, ``exp``
rank       scores as ordered integers, and elements as ranks that no two share
select     exact selection of a block: ``refine``, ``places``, ``compact``; ``select_group``: of 512 ranks, in registers
spread     the best ranks of a block in order, by bins; ``sort_block``: all of an array; ``group_floor``: a first bound
candidates ``nominate``, ``push_candidates``, ``merge_block``, …: the best of all ranks' scores (with ``nominate``,
           ``merge``, ``token``, ``shard``, ``result``)
threshold  ``find_threshold``: what the best of all ranks' scores reach, by histograms alone (``digits``), summed over
           the ranks; ``winners``: their list, of which each rank has a part
barrier    ``arrive``, ``wait``, ``barrier``: all ranks, block-paired
signal     ``signal.signal``, ``signal.wait``: one word to one peer, order and scope explicit
issue      ``loads_before``: in which order loads are issued
pause      what a long wait does between polls; ``poll``: how every wait polls, and how long
trace      ``stage``, ``mark``, ``begin``, ``end``: records of what a block does when, in kernels compiled to make them
access     typed global memory by address; every order and scope by name
reduce     ``sum_in_rank_order``, ``reduce_in_rank_order``: also avg, max and min
========== =====================================================================================================

A docstring is a contract: who calls it, what order it makes, what it does not do. Names a target overrides live in
``rocm.py`` and ``cuda.py``; the portable form stays callable as ``name.portable``.
"""

from flycomm.primitives import access, norm, packet, quant, ready, sentinel, signal, trace
from flycomm.primitives.barrier import arrive, barrier, wait
from flycomm.primitives.call import Call, again, begin, finish
from flycomm.primitives.fragment import all_reduce_fragment, collect, post, post_to, take
from flycomm.primitives.peers import peer_rank, peers_type, segment
from flycomm.primitives.reduce import reduce_in_rank_order, sum_in_rank_order
from flycomm.primitives.trace import stage

__all__ = [
    "Call",
    "access",
    "again",
    "all_reduce_fragment",
    "arrive",
    "barrier",
    "begin",
    "collect",
    "finish",
    "norm",
    "packet",
    "peer_rank",
    "peers_type",
    "post",
    "post_to",
    "quant",
    "ready",
    "reduce_in_rank_order",
    "segment",
    "sentinel",
    "signal",
    "stage",
    "sum_in_rank_order",
    "take",
    "trace",
    "wait",
]
