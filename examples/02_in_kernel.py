# SPDX-License-Identifier: Apache-2.0
"""The exchange inside your own FlyDSL kernel: compute, post, do something else, take, store. One launch.

Each rank squares its own fragment, the ranks sum the squares, and while the link is busy the kernel loads the bias
that it then adds. ``flycomm.all_reduce`` is a loop over the same primitives, so the sum has the same bits.

    python examples/02_in_kernel.py [RANKS]
"""

import sys

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch

import flycomm
import flycomm.primitives as fc
from flycomm.kernels import Specialization, compiled, null_pointer, peers_placeholder
from flycomm.primitives.access import load_fragment, store_fragment

THREADS = 64
ELEMENTS = THREADS * 4  # one fragment of four f32 a thread


def build(world: int, dtype: str, blocks: int, threads: int):
    """The launcher, and arguments that compile it. Every thread owns one fragment; its slot is its thread index."""
    peers = fc.peers_type(world, blocks)

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def sum_of_squares(comm: peers, x: fx.Pointer, bias: fx.Pointer, out: fx.Pointer):
        slot = fx.Int32(fx.thread_idx.x)
        offset = fx.Int64(slot) * fx.Int64(16)
        mine = load_fragment(fx.Int64(fx.ptrtoint(x)) + offset, fx.Float32)
        partial = mine * mine

        call = fc.begin(comm)
        fc.post(call, partial, slot)
        fc.arrive(call)
        extra = load_fragment(fx.Int64(fx.ptrtoint(bias)) + offset, fx.Float32)  # hides the link
        fc.wait(call)
        total = fc.take(call, partial, slot)
        fc.finish(call)
        store_fragment(fx.Int64(fx.ptrtoint(out)) + offset, total + extra)

    @flyc.jit
    def launch(comm: peers, x: fx.Pointer, bias: fx.Pointer, out: fx.Pointer, stream: fx.Stream):
        sum_of_squares(comm, x, bias, out).launch(grid=(blocks,), block=(threads,), stream=stream)

    null = null_pointer(fx.Float32, 16)
    return launch, (peers_placeholder(world, blocks), null, null, null, fx.Stream(None))


def in_kernel(comm: flycomm.Communicator, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``all_reduce(x * x) + bias`` in one launch."""
    out = torch.empty_like(x)
    kernel = compiled(Specialization("sum_of_squares", build, comm.world_size, "f32", 1, THREADS))
    kernel(comm.peers("squares"), x.data_ptr(), bias.data_ptr(), out.data_ptr(), comm.stream())
    return out


def main(world: flycomm.World) -> None:
    with flycomm.init(world=world, max_bytes=16 << 20, kernel_channels={"squares": (1, ELEMENTS * 4)}) as comm:
        x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
        bias = torch.arange(float(ELEMENTS), device=comm.device)
        fused = in_kernel(comm, x, bias)
        separate = comm.all_reduce(x * x) + bias
        assert torch.equal(fused, separate), f"rank {comm.rank}: the two forms differ"
        if comm.rank == 0:
            print(f"{comm.world_size} ranks on {comm.target}: in-kernel and torch op give the same {ELEMENTS} values.")


if __name__ == "__main__":
    world = flycomm.World.auto()
    if world.size > 1:
        main(world)
    else:
        flycomm.World.local(int(sys.argv[1]) if len(sys.argv) > 1 else 2).run(main)
