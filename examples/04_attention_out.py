# SPDX-License-Identifier: Apache-2.0
"""What follows attention in one launch: its output projection, all-reduce, norm, router and the choice of experts.

python examples/04_attention_out.py                          two virtual ranks: threads of this process
torchrun --nproc-per-node 2 examples/04_attention_out.py     real processes
"""

import torch

import flycomm
from flycomm.kernels.mono_attention_out import Layer, slot_bytes
from flycomm.mono import AttentionOutLayer

# inner: of one rank's heads; up to two token rows. As DeepSeek and MiniMax route: sigmoid, a bias that only chooses.
LAYER = Layer(hidden=256, inner=64, experts=32, top_k=4, rows=2, scoring="sigmoid", bias=True)
BLOCKS, THREADS, EPS = 2, 128, 1e-6


def heads(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What rank ``rank`` has: its heads' output (rows, inner), and its columns (hidden, inner) of the projection."""
    one, generator = LAYER, torch.Generator().manual_seed(1 + rank)
    x = torch.randn(one.rows, one.inner, generator=generator).bfloat16()
    return x, (torch.randn(one.hidden, one.inner, generator=generator) * one.inner**-0.5).bfloat16()


def scores_in_f64(residual: torch.Tensor, norm: torch.Tensor, router: torch.Tensor, world: int) -> torch.Tensor:
    total = residual.double()
    for x, o_proj in map(heads, range(world)):
        total = total + x.double() @ o_proj.double().T
    normed = total * torch.rsqrt((total * total).mean(-1, keepdim=True) + EPS) * norm.double()
    return torch.sigmoid(normed @ router.double().T)


def main(world: flycomm.World) -> None:
    channels = {"attention_out": (BLOCKS, slot_bytes(LAYER))}
    with flycomm.init(world=world, max_bytes=16 << 20, kernel_channels=channels) as comm:
        layer, one = AttentionOutLayer(comm, "attention_out", LAYER, THREADS), LAYER
        everywhere = torch.Generator().manual_seed(0)  # what all ranks have alike
        residual = torch.randn(one.rows, one.hidden, generator=everywhere).bfloat16()
        router = (torch.randn(one.experts, one.hidden, generator=everywhere) * one.hidden**-0.5).bfloat16()
        bias = torch.randn(one.experts, generator=everywhere) * 0.1
        norm = torch.ones(one.hidden, dtype=torch.bfloat16)
        x, o_proj = heads(comm.rank)
        inputs = (tensor.to(comm.device) for tensor in (x, residual, o_proj, norm, router, bias))

        _, _, ids, weights = layer(*inputs, EPS)

        comm.check()
        scores, chosen = scores_in_f64(residual, norm, router, comm.world_size), ids.cpu().long()
        deciding = scores + bias.double()
        missed = (deciding.topk(one.top_k).values - deciding.gather(1, chosen)).max().item()
        share = scores.gather(1, chosen)
        error = (weights.cpu().double() - share / share.sum(-1, keepdim=True)).abs().max().item()
        assert max(missed, error) < 2**-7, f"rank {comm.rank}: {missed:.1e} below the best, weights off by {error:.1e}"
        comm.barrier()
        if comm.rank == 0:
            print(
                f"mono attention output of {one.rows} rows by {comm.world_size} ranks on target {comm.target}, one "
                f"launch: experts {ids[0].tolist()} for the first row, weights {error:.1e} from f64."
            )


if __name__ == "__main__":
    world = flycomm.World.auto()
    if world.size > 1:
        main(world)
    else:
        flycomm.World.local(2).run(main)
