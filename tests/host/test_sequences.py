# SPDX-License-Identifier: Apache-2.0
"""Legal sequences of mixed calls on one communicator, made by hypothesis: every call right to the bit on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from flycomm.dtypes import REDUCTIONS
from flycomm.tables import PROTOCOLS
from tests.host.test_collectives import reduced
from tests.ranks import DTYPES, run, same_bits, sample

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

KINDS = ("all_reduce", "in_place", "scatter", "gather", "norm", "barrier", "symmetric", "signal")
SIZES = (0, 1, 5, 64, 1023, 1024, 2500, 4099, 20_000)
SYMMETRIC = 3000


@dataclass(frozen=True)
class Call:
    kind: str
    dtype: str
    size: int
    reduction: str
    late: int | None  # rank that comes to it late


CALLS = st.lists(
    st.builds(
        Call,
        st.sampled_from(KINDS),
        st.sampled_from(tuple(DTYPES)),
        st.sampled_from(SIZES),
        st.sampled_from(REDUCTIONS),
        st.one_of(st.none(), st.integers(0, 4)),
    ),
    min_size=15,
    max_size=40,
)


def _make(comm, call, number, symmetric):
    """One call; what it gave and what it should have given."""
    world, rank, dtype, size = comm.world_size, comm.rank, DTYPES[call.dtype], call.size
    if call.kind == "symmetric":
        symmetric.tensor.copy_(sample(comm, (SYMMETRIC,), torch.float32, number))
        return symmetric.all_reduce(call.reduction), reduced(comm, (SYMMETRIC,), torch.float32, number, call.reduction)
    if call.kind == "gather":
        parts = [sample(comm, (size,), dtype, number, other) for other in range(world)]
        return comm.all_gather_into_tensor(parts[rank]), torch.cat(parts)
    if call.kind == "norm":
        x = sample(comm, (2, 8 * (size % 97 + 1)), dtype, number)
        _, residual_out = comm.all_reduce_rms_norm(x, torch.zeros_like(x), torch.ones_like(x[0]))
        return residual_out, reduced(comm, tuple(x.shape), dtype, number)
    shape = (world * size,)
    x, want = sample(comm, shape, dtype, number), reduced(comm, shape, dtype, number, call.reduction)
    if call.kind == "scatter":
        return comm.reduce_scatter_tensor(x, call.reduction), want[rank * size : (rank + 1) * size]
    return (comm.all_reduce_ if call.kind == "in_place" else comm.all_reduce)(x, call.reduction), want


def _sequence(comm, calls):
    symmetric = comm.empty((SYMMETRIC,), torch.float32)
    for number, call in enumerate(calls):
        if call.late == comm.rank:
            time.sleep(0.002)
        if call.kind == "barrier":
            comm.barrier()
        elif call.kind == "signal":
            if comm.world_size > 1:
                comm.put_signal((comm.rank + 1) % comm.world_size)
                comm.wait_signal((comm.rank - 1) % comm.world_size)
        else:
            got, want = _make(comm, call, number, symmetric)
            assert same_bits(got, want), (comm.rank, number, call)


@pytest.mark.parametrize("protocol", [*PROTOCOLS, "auto"])
def test_mixed_calls(protocol):
    @hypothesis.settings(max_examples=5)
    @hypothesis.given(calls=CALLS, world=st.sampled_from((2, 3, 5)))
    def of(calls, world):
        run(world, _sequence, calls, protocol=protocol, max_bytes=32 << 20)

    of()
