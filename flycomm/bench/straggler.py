# SPDX-License-Identifier: Apache-2.0
"""One rank is late to every call, by the device's own clock, and another one each time: ``--skew-us``.

The late rank's stream runs a kernel of one thread that watches the clock, then the call; in a captured graph that is a
node before the call's. The others call at once and wait inside for as long as their protocol makes them.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch

from flycomm import kernels
from flycomm.bench.contender import Context
from flycomm.bench.timing import Call
from flycomm.kernels import Specialization
from flycomm.kernels._launch import null_pointer
from flycomm.primitives.access import clock

_THREADS = 32


def spin() -> Specialization:
    """Lasts a number of clock ticks. Arguments of a launch: ``(ticks, anchor, stream)``: i64, any device address."""
    return Specialization("straggler_spin", _build, 1, "", 1, _THREADS)


def _build(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
    @flyc.kernel(known_block_size=[threads, 1, 1])
    def straggler_spin(ticks: fx.Int64) -> None:
        if fx.thread_idx.x == 0:
            started = clock()
            late = ticks > fx.Int64(0)
            while late:
                late = clock() - started < ticks

    @flyc.jit
    def launch(ticks: fx.Int64, anchor: fx.Pointer, stream: fx.Stream) -> None:
        straggler_spin(ticks).launch(grid=(blocks,), block=(threads,), stream=stream)

    return launch, (fx.Int64(0), null_pointer(fx.Int32, 4), fx.Stream(None))


def prepare(context: Context) -> None:
    """Collective: every rank has the kernel loaded, so that none loads it while another waits in a collective."""
    context.target.preload(kernels.compiled(spin()), context.world.device)
    context.world.barrier()


def delaying(context: Context, delay_us: float, call: Call) -> Call:
    """``call`` with a delay of ``delay_us`` in front on one rank: rank 0 for its first call, then 1, and so on.

    All ranks make the same calls. 0 gives ``call`` itself.
    """
    if not delay_us:
        return call
    world, target = context.world, context.target
    handle = kernels.compiled(spin())
    ticks = round(delay_us * target.capabilities(world.device).clock_hz / 1e6)
    anchor = torch.zeros(4, device=context.device)
    made = 0

    def late(index: int) -> Any:
        nonlocal made
        if made % world.size == world.rank:
            handle(ticks, anchor.data_ptr(), target.runtime.current_stream(world.device))
            target.raise_pending()
        made += 1
        return call(index)

    return late
