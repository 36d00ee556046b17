# SPDX-License-Identifier: Apache-2.0
"""All-reduces that must have the same bits on every target. ``python host_results.py FILE`` saves this target's."""

from __future__ import annotations

import sys

import torch

from tests.ranks import DTYPES, run, same_bits, sample

WORLDS = (2, 3, 8)
SIZES = (1, 9, 4097, 40_000)
ANY_BITS = 4096  # elements

# Of each sign: 0, the least and the greatest denormal, the least normal number, 1, the next after 1 (so that its sums
# with 1 lie halfway between two numbers), the greatest, infinity, NaN.
SPECIAL = {
    torch.float32: (0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    torch.float16: (0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E00),
    torch.bfloat16: (0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0),
}


def _words(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def special_values(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Every special value of rank 0 meets every one of rank 1, and further ranks go on in other steps."""
    half = torch.tensor(SPECIAL[dtype], dtype=_words(dtype))
    values = torch.cat([half, half | torch.iinfo(_words(dtype)).min])
    count = len(values)
    first, step = torch.arange(count * count) // count, torch.arange(count * count) % count
    return values[(first + rank * step) % count].view(dtype)


def any_bits(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Words with every bit at random: all exponents, denormals, infinities and NaN among them."""
    limits = torch.iinfo(_words(dtype))
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(limits.min, limits.max + 1, (ANY_BITS,), generator=generator).to(_words(dtype)).view(dtype)


def results(world: int, protocol: str = "auto") -> dict[str, torch.Tensor]:
    """The sums on ``world`` virtual ranks of the active target, by name, on the CPU; they are the same on all ranks."""

    def body(comm):
        sums = {}
        for name, dtype in DTYPES.items():
            for seed, size in enumerate(SIZES):
                sums[f"{name} {size}"] = comm.all_reduce(sample(comm, (size,), dtype, seed)).cpu()
            for make in (special_values, any_bits):
                sums[f"{name} {make.__name__}"] = comm.all_reduce(make(dtype, comm.rank).to(comm.device)).cpu()
        return sums

    first, *others = run(world, body, protocol=protocol)
    for rank, other in enumerate(others, 1):
        for name, total in first.items():
            assert same_bits(other[name], total), f"world {world}: {name} on rank {rank} is not as on rank 0"
    return first


if __name__ == "__main__":
    torch.save({world: results(world) for world in WORLDS}, sys.argv[1])
