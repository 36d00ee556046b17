# SPDX-License-Identifier: Apache-2.0
"""What happens when a rank does not come, or calls something else: a report, never a hang, and a way back."""

from __future__ import annotations

import time

import pytest
import torch

from flycomm import targets
from flycomm.channel import SENTINEL
from flycomm.errors import CommTimeout, DisagreementError, PeerAccessError, TargetError
from tests.ranks import rank_order_sum, run, same_bits, sample

PHASE = {"flags": "signal", "packets": "packet", "sentinel": "sentinel"}


def _give_up(comm, missing, call):
    """Everyone but rank ``missing`` calls; returns the record that ``check`` then reports."""
    started = time.monotonic()
    if comm.rank != missing:
        call()
        comm._session.synchronize()
    took = time.monotonic() - started
    comm._session.world.barrier()
    if comm.rank == missing:
        return None
    with pytest.raises(CommTimeout) as caught:
        comm.check()
    with pytest.raises(CommTimeout):
        comm.barrier()
    assert took < 5.0
    return caught.value.record


@pytest.mark.parametrize(
    ("world", "protocol"), [(2, "flags"), (3, "flags"), (5, "flags"), (2, "packets"), (3, "sentinel"), (5, "packets")]
)
def test_a_missing_peer_ends_in_a_timeout_and_recover_helps(world, protocol):
    def body(comm):
        x = sample(comm, (700,), torch.float32, 0)
        comm.all_reduce(x)
        results = []
        record = _give_up(comm, 1, lambda: results.append(comm.all_reduce(x)))
        if record is not None:
            assert results[0].isnan().all(), "a failed call must not look like a result"
            assert record.rank == comm.rank
            assert record.phase == PHASE[protocol]
            assert record.block == 0
            assert record.reason in ("timeout", "abort")
            assert record.expected == 2
            if record.reason == "timeout":
                assert record.peer == 1
                assert record.seen == {"flags": 1, "packets": 0, "sentinel": SENTINEL}[protocol]
        comm.recover()
        for seed in range(3):
            want = rank_order_sum(comm, (700,), torch.float32, seed)
            assert same_bits(comm.all_reduce(sample(comm, (700,), torch.float32, seed)), want)
        return record

    records = [record for record in run(world, body, timeout=0.3, protocol=protocol) if record]
    assert any(record.reason == "timeout" for record in records)


def test_later_launches_of_a_poisoned_channel_return_at_once():
    def body(comm):
        comm.prepare([torch.float32], [256])
        x = sample(comm, (64,), torch.float32, 0)
        if comm.rank == 0:
            comm.all_reduce(x)
            comm._session.synchronize()
            launch = comm._collectives._launch("all_reduce", "sum", x.dtype, x.numel(), 0, False)
            started = time.monotonic()
            for _ in range(50):  # as a graph with 50 nodes would: nobody checks in between
                launch(x.data_ptr(), x.data_ptr(), comm.stream())
            comm._session.synchronize()
            assert time.monotonic() - started < 5.0, "50 launches must not wait 50 limits"
        comm._session.world.barrier()
        comm.recover()

    run(2, body, timeout=0.5)


def test_a_missing_peer_in_a_barrier_and_in_a_wait():
    def body(comm):
        comm.prepare([torch.float32], [256])
        record = _give_up(comm, 1, comm.barrier)
        assert record is None or record.phase == "barrier"
        comm.recover()
        record = _give_up(comm, 1, lambda: comm.wait_signal(1, 5))
        assert record is None or (record.phase, record.peer, record.expected) == ("wait_signal", 1, 1)
        comm.recover()
        comm.barrier()

    run(2, body, timeout=0.3)


def test_different_counts_are_reported_by_tag():
    def body(comm):
        comm.all_reduce(sample(comm, (100 + comm.rank,), torch.float32, 0))
        comm._session.synchronize()
        comm._session.world.barrier()
        with pytest.raises(CommTimeout) as caught:
            comm.check()
        return caught.value.record.reason

    assert "mismatch" in run(2, body, timeout=2.0, protocol="flags")


def test_debug_mode_names_both_sides():
    def body(comm):
        with pytest.raises(
            DisagreementError,
            match=r"rank 0 calls.*\[100\].*rank 1 calls.*\[101\]|rank 1 calls.*\[101\].*rank 0 calls.*\[100\]",
        ):
            comm.all_reduce(sample(comm, (100 + comm.rank,), torch.float32, 0))
        with pytest.raises(DisagreementError, match=r"float32.*float16|float16.*float32"):
            comm.all_reduce(torch.zeros(8, dtype=torch.float32 if comm.rank else torch.float16, device=comm.device))
        want = rank_order_sum(comm, (9,), torch.float32, 2)
        assert same_bits(comm.all_reduce(sample(comm, (9,), torch.float32, 2)), want)

    run(2, body, debug=True)


def test_a_rank_that_fails_on_the_host_does_not_keep_the_others_waiting():
    seen = []

    def body(comm):
        comm.prepare([torch.float32], [256])
        x = sample(comm, (64,), torch.float32, 0)
        comm.all_reduce(x)
        comm.barrier()
        comm._session.synchronize()
        comm._session.world.barrier()
        if comm.rank == 1:
            raise KeyError("a fault of the user's own")
        started = time.monotonic()
        comm.all_reduce(x)
        comm._session.synchronize()
        seen.append(time.monotonic() - started)
        with pytest.raises(CommTimeout, match="abort"):
            comm.check()

    with pytest.raises(KeyError, match="of the user's own"):
        run(2, body, timeout=60.0)
    deadline = time.monotonic() + 20
    while not seen and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seen
    assert seen[0] < 20.0
    run(2, lambda comm: comm.barrier())  # the names are free again


def test_refused_peer_access_is_an_error_on_all_ranks(monkeypatch):
    memory = targets.active().memory

    def refuse(*_):
        raise TargetError("the driver says no")

    with monkeypatch.context() as patched:
        patched.setattr(memory, "open", refuse)
        patched.setattr(memory, "enable_peer", refuse)
        with pytest.raises(PeerAccessError, match=r"mapped by all ranks.*rank 0: .*says no.*rank 1: .*says no"):
            run(2, lambda comm: None)
    run(2, lambda comm: comm.barrier())


@pytest.mark.parametrize("protocol", PHASE)
def test_a_rank_that_comes_after_its_peer_gave_up_is_told(protocol):
    def late_calls(comm, x, want):
        for _ in range(3):  # what the peer sent before it gave up may still be summed, and is right
            result = comm.all_reduce(x)
            assert result.isnan().all() or same_bits(result, want)
            comm._session.synchronize()

    def body(comm):
        comm.prepare([torch.float32], [2800])
        x = sample(comm, (700,), torch.float32, 0)
        want = rank_order_sum(comm, (700,), torch.float32, 0)
        comm.all_reduce(x)
        comm._session.synchronize()
        comm._session.world.barrier()
        if comm.rank == 0:
            comm.all_reduce(x)
            comm._session.synchronize()
        comm._session.world.barrier()
        if comm.rank == 1:
            with pytest.raises(CommTimeout, match="abort"):
                late_calls(comm, x, want)
        comm._session.world.barrier()
        comm.recover()
        assert same_bits(comm.all_reduce(x), want)

    run(2, body, timeout=0.3, protocol=protocol)
