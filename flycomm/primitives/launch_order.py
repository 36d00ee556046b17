# SPDX-License-Identifier: Apache-2.0
"""A kernel that is launched while the one ahead of it on its stream still runs.

On NVIDIA GPUs of compute capability 9.0 and later (programmatic dependent launch): the blocks of the next kernel take
their places early, and wait there, in hardware, for this one to end, which hides what a launch costs. On other targets
both verbs are nothing, and a kernel begins when the one ahead of it has ended. The docs' memory model says why nothing
changes for the protocols ("A kernel that is there early").

A kernel in whose code :func:`wait_for_previous` stands is launched so that it may begin early, where a communicator has
room for it (:meth:`flycomm.targets.Target.start_early`); no other kernel is. ``FLYCOMM_PDL=0`` leaves both out.
"""

from flycomm.geometry import EARLY_THREADS
from flycomm.primitives._override import overridable


@overridable
def wait_for_previous() -> None:
    """Until every kernel ahead of this one on its stream has ended, and its stores are visible here.

    Called by every thread of the grid, at the top of the kernel, before its first access to global memory: reads and
    writes, of inputs, outputs, state and peers alike, since an earlier kernel may still write or read any of them. What
    depends on the kernel's arguments alone may come before. Then the order of two kernels on a stream is what it always
    was; a block that did not call it could end before the kernel ahead, and the kernel behind would take that for the
    end of both.
    """


@overridable
def let_next_start() -> None:
    """The next kernel on the stream may take its places, if it is one that waits for this one. Orders nothing.

    Called by every thread of the grid; counts when every block has called it or ended. A kernel without it lets the
    next one start when its blocks have ended. After :func:`wait_for_previous`, so that no more than two kernels of a
    stream hold places: who comes third cannot, before the first has ended.
    """


def in_turn(blocks: int, threads: int) -> None:
    """:func:`wait_for_previous`, then :func:`let_next_start`, in a grid of ``blocks`` blocks of ``threads``.

    The first line of a kernel that does little beside the exchange. Nothing for a grid of over
    ``geometry.EARLY_THREADS`` threads: two of them would not have room beside those of other lanes, and what they do
    takes much longer than a launch. ``threads``: as a budget counts them, by which a compute unit holds
    ``geometry.RESIDENT_THREADS``.
    """
    if blocks * threads <= EARLY_THREADS:
        wait_for_previous()
        let_next_start()
