# SPDX-License-Identifier: Apache-2.0
"""All-reduce as a torch op.

python examples/01_all_reduce.py                          two virtual ranks: threads of this process
torchrun --nproc-per-node 2 examples/01_all_reduce.py     real processes
"""

import torch

import flycomm


def main(world: flycomm.World) -> None:
    with flycomm.init(world=world, max_bytes=16 << 20) as comm:
        x = torch.full((4096,), 1.0 + comm.rank, dtype=torch.bfloat16, device=comm.device)

        y = torch.ops.flycomm.all_reduce(x, "sum", comm.group_name)  # or comm.all_reduce(x)

        expected = sum(1.0 + rank for rank in range(comm.world_size))
        assert torch.all(y == expected), f"rank {comm.rank}: got {y[0].item()}, expected {expected}"
        comm.barrier()
        if comm.rank == 0:
            print(
                f"all-reduce over {comm.world_size} ranks on target {comm.target} ({comm.device}): "
                f"{x.numel()} bf16 elements, every one {expected:g}. Correct."
            )


if __name__ == "__main__":
    world = flycomm.World.auto()
    if world.size > 1:
        main(world)
    else:
        flycomm.World.local(2).run(main)
