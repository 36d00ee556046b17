# SPDX-License-Identifier: Apache-2.0
"""A feed-forward layer with its all-reduce, norm and the next projection in one launch.

python examples/03_mono_ffn.py                          two virtual ranks: threads of this process
torchrun --nproc-per-node 2 examples/03_mono_ffn.py     real processes
"""

import torch

import flycomm
from flycomm.kernels.mono_ffn import Layer, slot_bytes
from flycomm.mono import FfnLayer

LAYER = Layer(hidden=256, inter=128, out=128, rows=2)  # inter and out of one rank; up to two token rows
BLOCKS, THREADS, EPS = 2, 128, 1e-6


def weights(rank: int) -> tuple[torch.Tensor, ...]:
    """What rank ``rank`` holds: gate and up (2 * inter, hidden), down (hidden, inter), the projection (out, hidden)."""
    one, generator = LAYER, torch.Generator().manual_seed(1 + rank)
    shapes = (2 * one.inter, one.hidden), (one.hidden, one.inter), (one.out, one.hidden)
    return tuple((torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16() for shape in shapes)


def in_f64(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    total = residual.double()
    for gate_up, down, _ in map(weights, range(world)):
        gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=1)
        total = total + (torch.nn.functional.silu(gate) * up) @ down.double().T
    normed = total * torch.rsqrt((total * total).mean(-1, keepdim=True) + EPS) * norm.double()
    return normed @ weights(rank)[2].double().T


def main(world: flycomm.World) -> None:
    channels = {"ffn": (BLOCKS, slot_bytes(LAYER))}
    with flycomm.init(world=world, max_bytes=16 << 20, kernel_channels=channels) as comm:
        layer = FfnLayer(comm, "ffn", LAYER, THREADS)
        everywhere = torch.Generator().manual_seed(0)  # tokens are the same on all ranks
        x, residual = (torch.randn(LAYER.rows, LAYER.hidden, generator=everywhere).bfloat16() for _ in range(2))
        norm = torch.ones(LAYER.hidden, dtype=torch.bfloat16)
        gate_up, down, projection = (one.to(comm.device) for one in weights(comm.rank))

        out, _ = layer(
            x.to(comm.device), residual.to(comm.device), gate_up, down, norm.to(comm.device), projection, EPS
        )

        comm.check()
        exact = in_f64(x, residual, norm, comm.world_size, comm.rank)
        error = ((out.cpu().double() - exact).norm() / exact.norm()).item()
        assert error < 2**-7, f"rank {comm.rank}: off by {error:.1e}"
        comm.barrier()
        if comm.rank == 0:
            print(
                f"mono FFN of {LAYER.rows} rows by {comm.world_size} ranks on target {comm.target}, one launch: "
                f"{error:.1e} from f64."
            )


if __name__ == "__main__":
    world = flycomm.World.auto()
    if world.size > 1:
        main(world)
    else:
        flycomm.World.local(2).run(main)
