# SPDX-License-Identifier: Apache-2.0
"""The k best of scores that are spread over the ranks, in one launch.

python examples/05_topk_exchange.py                          two virtual ranks: threads of this process
torchrun --nproc-per-node 2 examples/05_topk_exchange.py     real processes
"""

import torch

import flycomm
from flycomm.indexer.shard import ShardLayout

ROWS, CONTEXT, K, GRANULE = 3, 1000, 16, 64  # query rows, keys that they see, how many to keep, keys a rank at a time


def main(world: flycomm.World) -> None:
    with flycomm.init(world=world, max_bytes=16 << 20, topk=(ROWS, K)) as comm:
        # every rank could score all keys; each scores its own share: granules of 64, dealt out in turn
        everything = torch.randn(ROWS, CONTEXT, generator=torch.Generator().manual_seed(1))
        layout = ShardLayout(comm.world_size, GRANULE)
        local = torch.arange(layout.local_length(CONTEXT, comm.rank))
        mine = everything[:, layout.to_global(local, comm.rank)].to(comm.device)
        lengths = torch.full((ROWS,), CONTEXT, dtype=torch.int32, device=comm.device)

        best, ids, counts = comm.topk_exchange(mine, lengths, K, layout=layout)

        wanted = torch.topk(everything, K)
        assert torch.equal(ids.cpu(), wanted.indices.int()), f"rank {comm.rank}: {ids.tolist()}"
        assert torch.equal(best.cpu(), wanted.values)
        assert counts.tolist() == [K] * ROWS
        comm.barrier()
        if comm.rank == 0:
            print(
                f"the {K} best of {CONTEXT} scores, spread over {comm.world_size} ranks on target {comm.target}: "
                f"the first row's are {ids[0].tolist()}. The same on every rank as on one alone."
            )


if __name__ == "__main__":
    world = flycomm.World.auto()
    if world.size > 1:
        main(world)
    else:
        flycomm.World.local(2).run(main)
