# SPDX-License-Identifier: Apache-2.0
"""World: exchange and agreement between virtual ranks, and what happens when a rank fails or stays away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from flycomm import targets
from flycomm.errors import ClosedError, CommError, DisagreementError, UsageError
from flycomm.world import World, _local
from flycomm.world._base import ordinal_of

SIZES = [1, 2, 3, 5, 8]


def payload(rank: int, turn: int) -> bytes:
    """Different on every rank and in every turn; of any length, 0 too."""
    return bytes([rank, turn]) * (rank * 3 + turn % 4 * 100)


@pytest.mark.parametrize("size", SIZES)
def test_exchange_gathers_in_rank_order(size: int):
    def body(world: World) -> None:
        assert (world.size, world.local) == (size, True)
        for turn in range(20):
            got = world.exchange(payload(world.rank, turn))
            assert got == [payload(rank, turn) for rank in range(size)]

    World.local(size).run(body)


@pytest.mark.parametrize("size", SIZES)
def test_run_returns_results_in_rank_order_from_named_threads(size: int):
    def body(world: World, add: int) -> tuple[int, str]:
        return world.rank + add, threading.current_thread().name

    assert World.local(size).run(body, 10) == [(rank + 10, f"rank{rank}") for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_holds_until_the_last_rank(size: int):
    arrived = set()

    def body(world: World) -> None:
        for turn in range(5):
            time.sleep(0.002 * ((world.rank + turn) % 3))
            arrived.add((world.rank, turn))
            world.barrier()
            assert {(rank, turn) for rank in range(size)} <= arrived

    World.local(size).run(body)


@pytest.mark.parametrize("size", SIZES)
def test_all_of_any_of_and_vote(size: int):
    def body(world: World) -> None:
        last = world.rank == size - 1
        assert world.all_of(True)
        assert not world.all_of(not last)
        assert world.any_of(last)
        assert not world.any_of(False)
        assert world.vote(True, "unused") == []
        assert world.vote(not last, "no memory") == [f"rank {size - 1}: no memory"]
        assert world.vote(False, f"reason {world.rank}") == [f"rank {rank}: reason {rank}" for rank in range(size)]

    World.local(size).run(body)


def test_agree_passes_on_equal_values():
    World.local(3).run(lambda world: world.agree(b"\x00\xff" * 5000, "table"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([b"4096", b"4096", b"8192"], "ranks 0, 1 have bytes 4096, rank 2 has bytes 8192"),
        ([b"\x00\x01", b"\xff", b"\x00\x01"], "ranks 0, 2 have bytes 0001, rank 1 has bytes ff"),
        ([b"", b"x", b"x"], "rank 0 has bytes , ranks 1, 2 have bytes x"),
    ],
)
def test_agree_names_both_sides_on_all_ranks(values: list[bytes], said: str):
    def body(world: World) -> str:
        with pytest.raises(DisagreementError) as caught:
            world.agree(values[world.rank], "bytes")
        return str(caught.value)

    messages = World.local(3).run(body)
    assert said in messages[0]
    assert len(set(messages)) == 1


def test_agree_shows_where_long_values_begin_to_differ():
    def body(world: World) -> str:
        with pytest.raises(DisagreementError) as caught:
            world.agree(b"a" * 1000 + b"here" + bytes([48 + world.rank]) + b"b" * 1000, "table")
        return str(caught.value)

    message = World.local(2).run(body)[0]
    assert "here0" in message
    assert "here1" in message
    assert len(message) < 500


def test_calls_that_do_not_match_are_an_error_on_all_ranks():
    def body(world: World) -> str:
        with pytest.raises(DisagreementError) as caught:
            world.barrier() if world.rank == 1 else world.vote(True, "")
        return str(caught.value)

    for message in World.local(3).run(body):
        assert "ranks 0, 2 have vote, rank 1 has barrier" in message


def test_a_rank_that_raises_unblocks_the_others():
    seen: dict[int, str] = {}

    def body(world: World) -> None:
        world.barrier()
        if world.rank == 2:
            raise KeyError("lost")
        try:
            world.exchange(b"x")
        except CommError as error:
            seen[world.rank] = str(error)
            raise

    started = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        World.local(4).run(body)
    assert time.monotonic() - started < 5
    assert caught.value.__notes__ == ["raised on rank 2"]
    assert seen == dict.fromkeys((0, 1, 3), "rank 2 failed: KeyError: 'lost'")


def test_a_round_that_is_complete_counts_though_a_rank_fails_right_after_it():
    def body(world: World) -> list[bytes]:
        got = world.exchange(bytes([world.rank]))
        if world.rank == 0:
            raise KeyError("after")
        delivered.append(got)
        return got

    for _ in range(50):
        delivered: list[list[bytes]] = []
        with pytest.raises(KeyError, match="after"):
            World.local(3).run(body)
        assert delivered == [[b"\0", b"\1", b"\2"]] * 2


def test_a_rank_that_returns_early_unblocks_the_others():
    def body(world: World) -> None:
        if world.rank != 1:
            world.barrier()

    with pytest.raises(CommError, match=r"rank 1 returned while rank \d waits for it"):
        World.local(3).run(body)


def test_a_rank_that_does_not_return_is_named_and_keeps_the_next_run_out():
    release = threading.Event()

    def body(world: World) -> None:
        if world.rank == 1:
            release.wait(30)
        world.barrier()

    worlds = World.local(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_local, "_GRACE_S", 0.1)
        with pytest.raises(CommError, match=r"ranks 0, 1 did not return within 0.2 s"):
            worlds.run(body, timeout=0.2)
    with pytest.raises(CommError, match="rank 1 of an earlier run has not returned"):
        worlds.run(lambda world: None)
    release.set()
    while any(thread.name == "rank1" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert worlds.run(lambda world: world.exchange(b"again")) == [[b"again"] * 2] * 2


def test_a_wait_for_other_ranks_has_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_local, "LIMIT_S", 0.1)
    with pytest.raises(CommError, match=r"rank 0 waited 0.1 s for ranks 1, 2"):
        World.local(3)[0].barrier()


def test_worlds_can_be_used_again_after_a_failed_run():
    worlds = World.local(3)
    with pytest.raises(ZeroDivisionError):
        worlds.run(lambda world: 1 // (world.rank - 1) or world.barrier())
    assert worlds.run(lambda world: world.exchange(bytes([world.rank]))) == [[b"\0", b"\1", b"\2"]] * 3


def test_a_single_world_is_alone():
    world = World.single()
    assert (world.rank, world.size, world.local) == (0, 1, False)
    assert world.exchange(b"me") == [b"me"]
    assert world.vote(False, "no") == ["rank 0: no"]
    world.barrier()
    world.agree(b"x", "value")


def test_a_closed_world_is_refused():
    world = World.single()
    world.close()
    world.close()
    with pytest.raises(ClosedError, match="rank 0 called barrier on a closed world"):
        world.barrier()


def test_devices():
    assert [world.device for world in World.local(3, devices=[2, "cuda:0", torch.device("cuda", 1)])] == [2, 0, 1]
    with pytest.raises(UsageError, match="2 devices were given for 3 ranks"):
        World.local(3, devices=[0, 1])
    with pytest.raises(UsageError, match="a world of 0 ranks"):
        World.local(0)


@pytest.mark.parametrize(("device", "ordinal"), [(None, None), (3, 3), ("1", 1), ("cuda:5", 5), ("cpu", 0)])
def test_what_a_device_may_be(device: object, ordinal: int | None):
    assert ordinal_of(device) == ordinal
    if isinstance(device, str) and ":" in device:
        assert ordinal_of(torch.device(device)) == ordinal


@pytest.mark.parametrize("device", ["tpu:0", "cuda:x", -1, 1.5, "meta"])
def test_what_a_device_may_not_be(device: object):
    with pytest.raises(UsageError, match="is not understood"):
        ordinal_of(device)


class _Runtime:
    def device_count(self) -> int:
        return 3

    def current_device(self) -> int:
        return 2


class _Target:
    runtime = _Runtime()


def test_default_devices_are_dealt_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "current", _Target)
    assert [world.device for world in World.local(5)] == [0, 1, 2, 0, 1]
    assert World.single().device == 2
    assert World.single("cuda").device == 2


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_auto_is_single_when_started_alone(bare_environment: pytest.MonkeyPatch):
    assert World.auto().size == 1
    bare_environment.setenv("PMI_SIZE", "1")
    assert World.auto().size == 1


@pytest.mark.parametrize(
    ("variables", "made"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpi"),
        ({"PMI_SIZE": "4"}, "mpi"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "single"),
    ],
)
def test_auto_follows_the_launcher(bare_environment: pytest.MonkeyPatch, variables: dict[str, str], made: str):
    from flycomm.world._torch import TorchWorld

    for name, value in variables.items():
        bare_environment.setenv(name, value)
    bare_environment.setattr(World, "from_mpi", lambda device: "mpi")
    bare_environment.setattr(World, "single", lambda device: "single")
    bare_environment.setattr(TorchWorld, "started_by_torchrun", lambda device: "torchrun")
    assert World.auto() == made


def test_from_group_needs_a_process_group():
    with pytest.raises(UsageError, match="init_process_group"):
        World.from_group()


def test_virtual_ranks_want_cuda_to_load_kernels_at_once(monkeypatch: pytest.MonkeyPatch):
    variable = "CUDA_MODULE_LOADING"
    monkeypatch.setenv(variable, "LAZY")
    World.local(2)
    assert os.environ[variable] == "LAZY", "what a user has set stays"
    monkeypatch.delenv(variable)
    World.local(1)
    assert variable not in os.environ
    World.local(2)
    assert os.environ[variable] == "EAGER"


def test_nothing_is_imported_before_it_is_needed():
    code = (
        "import sys; from flycomm.world import World; World.local(1)[0].barrier(); World.auto().barrier();"
        "print([m for m in ('torch', 'mpi4py', 'pickle') if m in sys.modules])"
    )
    variables = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-S", "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
