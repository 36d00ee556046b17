# SPDX-License-Identifier: Apache-2.0
"""Ready marks in compiled AMD code: every wave waits, one write-back before the mark, one invalidate after polls."""

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
from build import build_launcher, needs_linker

import flycomm.primitives as fc
from flycomm.compile import ARCHES
from flycomm.kernels import null_pointer, peers_placeholder
from flycomm.primitives import ready
from flycomm.primitives.access import load_element, store_element

pytestmark = needs_linker
THREADS = 256


def _launcher():
    peers = fc.peers_type(2, 4)

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def hand_over(comm: peers, tile: fx.Pointer, words: fx.Pointer):
        call = fc.begin(comm)
        place = fx.Int64(fx.block_idx.x * THREADS + fx.thread_idx.x) * fx.Int64(4)
        address, marks = fx.Int64(fx.ptrtoint(tile)) + place, fx.Int64(fx.ptrtoint(words))
        store_element(address, fx.Int32(7))
        ready.mark(call, marks, call.block)
        ready.wait(call, marks, fx.Int32(0), fx.Int32(4))
        store_element(address + fx.Int64(65536), load_element(address + fx.Int64(4), fx.Int32))
        fc.finish(call)

    @flyc.jit
    def launch(comm: peers, tile: fx.Pointer, words: fx.Pointer, stream: fx.Stream):
        hand_over(comm, tile, words).launch(grid=(4,), block=(THREADS,), stream=stream)

    return launch, (peers_placeholder(2, 4), *[null_pointer(fx.Int32, 4)] * 2, fx.Stream(None))


@pytest.mark.parametrize("arch", ARCHES)
def test_order_is_in_the_code(arch):
    built = build_launcher(*_launcher(), arch)
    code = built.function.instructions()

    def first(opcode, after, words=frozenset()):
        return next(i for i in range(after, len(code)) if code[i].opcode == opcode and words <= code[i].words)

    def first_wait(after):
        return next(i for i in range(after, len(code)) if code[i].waits_for_stores())

    device = frozenset({"sc1"})
    tile = first("global_store_dword", 0)
    waited = first_wait(tile)
    met = first("s_barrier", tile)
    assert waited < met, "a barrier before every wave has waited"
    written_back = first("buffer_wbl2", met, device)
    mark = first("global_store_dword", first_wait(written_back), device)
    poll = first("global_load_dword", mark, device)
    (invalidate,) = [i for i, one in enumerate(code) if one.invalidates()]
    assert poll < invalidate
    assert device <= code[invalidate].words
    last = max(i for i, one in enumerate(code) if one.is_barrier())
    assert invalidate < last
    reads = [one.opcode for one in code[last:] if one.opcode.startswith(("global_load", "s_load"))]
    assert reads == ["global_load_dword"], "the tile, and not by a scalar load"
    assert not any(code[invalidate] in built.function.code_of(loop) for loop in built.function.loops)
