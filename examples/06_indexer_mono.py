# SPDX-License-Identifier: Apache-2.0
"""A sparse-attention indexer, spread over the ranks, with a projection in its waits: one launch a step.

python examples/06_indexer_mono.py                          two virtual ranks: threads of this process
torchrun --nproc-per-node 2 examples/06_indexer_mono.py     real processes
"""

from dataclasses import replace

import torch

import flycomm
from flycomm.indexer import BLOCK_MAX, IndexerCP, IndexScores, ShardLayout
from flycomm.kernels.mono_indexer import slot_bytes
from flycomm.mono import IndexerLayer

INDEXER = replace(BLOCK_MAX, k=3, lists=2)  # the best 3 blocks of each of 2 index heads, the last one always
HEADS, PAGE, PAGES = INDEXER.lists, INDEXER.block, 12  # a page is a block of 128 tokens
LENGTHS, QUERIES = (1000, 400), 1  # tokens of two requests, each with one query row
INNER, OUT = 64, 32  # of the projection
BLOCKS, THREADS = 5, 64  # a block for each of 2 × 2 lists, and one that only scores and projects


def alone(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """(heads, k) ids of one request, by one rank that scores everything, in f64."""
    keys = cache[table.long()].flatten(0, 1)[:length].double()
    dots = torch.nn.functional.pad(q.double() @ keys.T, (0, -length % PAGE), value=-torch.inf)
    blocks = dots.unflatten(1, (-1, PAGE)).amax(-1)
    blocks[:, -1] = torch.inf  # forced
    return blocks.topk(INDEXER.k).indices


def main(world: flycomm.World) -> None:
    channels = {"indexer": (BLOCKS, slot_bytes(BLOCKS, INDEXER.k))}
    rows = len(LENGTHS) * QUERIES
    lists = rows * INDEXER.lists
    with flycomm.init(world=world, max_bytes=16 << 20, topk=(lists, INDEXER.k), kernel_channels=channels) as comm:
        layout = ShardLayout(comm.world_size, PAGE)  # each rank scores its pages of a cache that all have
        scorer = IndexScores(comm, INDEXER, "bf16", HEADS, PAGE)
        shape = {"rows": rows, "max_tokens": PAGES * PAGE, "page": PAGE, "cache": "replicated", "parallel": True}
        indexer = IndexerCP(comm, INDEXER, layout, scorer=scorer, **shape)
        layer = IndexerLayer(comm, "indexer", indexer, INNER, OUT, THREADS)

        everywhere = torch.Generator().manual_seed(0)  # what all ranks have alike
        cache = torch.randn(2 * PAGES, PAGE, 128, generator=everywhere).bfloat16()
        table = torch.randperm(2 * PAGES, generator=everywhere).view(2, PAGES).int()
        q = torch.randn(rows, HEADS, 128, generator=everywhere).bfloat16()
        own = torch.Generator().manual_seed(1 + comm.rank)  # each rank projects with weights of its own
        x, weights = (torch.randint(-3, 4, (n, INNER), generator=own).bfloat16() for n in (rows, OUT))
        on = [one.to(comm.device) for one in (q, cache, table, x, weights)]

        plan = indexer.plan(torch.tensor(LENGTHS, dtype=torch.int32, device=comm.device), QUERIES)  # once a step
        found, projected = layer(on[0], None, *on[1:3], plan, *on[3:])  # once a layer

        comm.check()
        wanted = torch.cat([alone(q[i], cache, table[i], length) for i, length in enumerate(LENGTHS)])
        assert torch.equal(found.ids.cpu().long(), wanted), f"rank {comm.rank}: {found.ids.tolist()}"
        assert torch.equal(projected.cpu(), (x.double() @ weights.double().T).bfloat16())
        comm.barrier()
        if comm.rank == 0:
            print(
                f"the {INDEXER.k} best blocks of each index head by {comm.world_size} ranks on target {comm.target}, "
                f"with a projection, in one launch: {found.ids.tolist()}, as one rank that scores all finds them."
            )


if __name__ == "__main__":
    world = flycomm.World.auto()
    if world.size > 1:
        main(world)
    else:
        flycomm.World.local(2).run(main)
