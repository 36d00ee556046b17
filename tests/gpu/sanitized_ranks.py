# SPDX-License-Identifier: Apache-2.0
"""Run under compute-sanitizer by ``test_sanitizer.py``: two virtual ranks on one GPU, every protocol, odd sizes."""

from __future__ import annotations

import torch

import flycomm
from flycomm import targets
from flycomm.geometry import PROTOCOLS
from tests.ranks import rank_order_sum, same_bits, sample


def body(world: flycomm.World, protocol: str) -> None:
    with flycomm.init(world=world, protocol=protocol, fallback="error", max_bytes=8 << 20, timeout=120) as comm:
        comm.prepare([torch.float32, torch.bfloat16], [1, 20_000])
        for seed, size in enumerate((1, 9, 1023, 4097)):
            for dtype in (torch.float32, torch.bfloat16):
                x = sample(comm, (size,), dtype, seed)
                assert same_bits(comm.all_reduce(x), rank_order_sum(comm, (size,), dtype, seed))
        comm.barrier()
        comm.put_signal(1 - comm.rank)
        comm.wait_signal(1 - comm.rank)


if __name__ == "__main__":
    targets.activate(targets.pick())
    for name in PROTOCOLS:
        flycomm.World.local(2, devices=[0, 0]).run(body, name, timeout=200.0)
    print("every protocol: ok")
