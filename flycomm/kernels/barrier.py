# SPDX-License-Identifier: Apache-2.0
"""Barrier over all ranks, one block. Arguments of a launch: ``(comm, tag, anchor, stream)``.

``anchor`` is any device address: it is not read, and lets FlyDSL compile the launcher without running it.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.primitives.launch_order import in_turn


def build(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """The launcher and compile placeholders of one specialization; ``dtype`` is not used."""
    peers = fc.peers_type(world, blocks)

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def barrier(comm: peers, tag: fx.Int32):
        in_turn(blocks, threads)
        call = fc.begin(comm, tag)
        fc.barrier(call)
        fc.finish(call)

    @flyc.jit
    def launch(comm: peers, tag: fx.Int32, anchor: fx.Pointer, stream: fx.Stream):
        barrier(comm, tag).launch(grid=(blocks,), block=(threads,), stream=stream)

    return launch, (peers_placeholder(world, blocks), 0, null_pointer(fx.Int32, 4), fx.Stream(None))
