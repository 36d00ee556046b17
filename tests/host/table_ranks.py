# SPDX-License-Identifier: Apache-2.0
"""What test_tune.py runs on every rank: ``python table_ranks.py CASE FOLDER``. Prints ``rank <r>: ok`` when all held.

Rank 0 looks for tables in ``FOLDER``; every other rank in a folder of its own, where there is none, or a broken one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flycomm
from flycomm import tables, targets
from flycomm.errors import UsageError


def main(case: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.environ.pop("FLYCOMM_TABLE", None)
    os.environ["XDG_CACHE_HOME"] = str(folder if rank == 0 else folder / f"of rank {rank}")
    target = targets.pick()
    arch = target.capabilities(0).arch
    if rank and case == "broken":
        path = tables.user_path(arch)
        path.parent.mkdir(parents=True)
        path.write_text("{")
    assert tables.user_path(arch).is_file() == (rank == 0 or case == "broken")
    dist.init_process_group("gloo")
    if case == "wrong":
        with pytest.raises(UsageError, match=f"rank 0: .* is for another chip, this is {arch}"):
            flycomm.init(dist.group.WORLD, target=target.name)
    else:
        mine = tables.parse((folder / "flycomm" / f"{arch}.json").read_text(), "the tuned table")
        with flycomm.init(dist.group.WORLD, target=target.name, fallback="error") as comm:
            for op in tables.OPS:
                (meant, *_) = mine.of(op, comm.world_size, False)
                assert comm.plan(op, torch.bfloat16, 2048, captured=False).row == meant
            x = torch.full((1024,), float(rank + 1), dtype=torch.bfloat16, device=comm.device)
            assert comm.all_reduce(x).eq(sum(range(1, comm.world_size + 1))).all()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank}: ok\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
