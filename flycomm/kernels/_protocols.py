# SPDX-License-Identifier: Apache-2.0
"""What kernels that exchange fragments share: a protocol's verbs by name, and one exchange of a message of any size."""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from flycomm.channel import FRAGMENT_BYTES
from flycomm.primitives import fragment, packet, sentinel
from flycomm.primitives.call import Call, again
from flycomm.primitives.tensor import Share

VERBS: dict[str, Any] = {"flags": fragment, "packets": packet, "sentinel": sentinel}


def exchange(
    protocol: str,
    call: Call,
    share: Share,
    post: Callable[[Call, Any, Any], None],
    take: Callable[[Call, Any, Any], None],
) -> None:
    """``post``, the meeting of the ranks, ``take``, for the fragments of ``share``. Every thread calls it.

    Both get ``(call, base, n)``: this thread's slots below ``n`` (i32) stand for the fragments ``base + slot``. By
    flags a message longer than a staging slot goes in pieces, a call of the channel each; otherwise it has to fit one.
    """

    def piece(epoch: Any, ok: Any, last: Any, base: Any, n: Any) -> Any:
        one = again(call, epoch, ok, last)
        post(one, base, n)
        fragment.arrive(one)
        fragment.wait(one)
        take(one, base, n)
        return one.epoch, one.ok, one.found

    if protocol == "flags":
        in_pieces(call, share.fragments, fragments_of_a_slot(call), piece)
        return
    post(call, fx.Int32(0), share.fragments)
    if protocol == "packets":
        packet.meet(call)
    else:
        sentinel.meet(call, share.first, share.step, share.fragments)
    take(call, fx.Int32(0), share.fragments)


@flyc.jit
def in_pieces(call: Call, fragments: Any, each: Any, piece: Callable[..., Any], before: Any = None) -> None:
    """``piece(epoch, ok, last, base, n)`` for every ``each`` (i32) of ``fragments`` (i32) fragments, in order.

    ``before``: a call of the channel in this kernel that comes before the pieces, if there is one.

    ``epoch`` (u32) and ``ok`` (bool) are what the piece before left, ``last`` says that none follows: what
    :func:`~flycomm.primitives.call.again` wants. It returns the ``epoch``, ``ok`` and ``found`` of its last call.
    """
    epoch, ok, found = call.entered, call.live, call.entered
    if fx.const_expr(before is not None):
        epoch, ok = before.epoch, before.ok
    base = fx.Int32(0)
    while base < fragments:
        left = fragments - base
        last = left <= each
        epoch, ok, found = piece(epoch, ok, last, base, last.select(left, each))
        base = base + each
    call.ok = ok
    call.found = found


def fragments_of_a_slot(call: Call) -> Any:
    """How many fragments (i32) a source may post in one call by flags."""
    return fx.Int32(call.comm.capacity // fx.Int64(FRAGMENT_BYTES))
