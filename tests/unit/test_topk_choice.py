# SPDX-License-Identifier: Apache-2.0
"""Which algorithm a top-k exchange takes, and that ranks may read their scores by different kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flycomm import session as sessions
from flycomm.errors import UsageError
from flycomm.kernels import Specialization
from flycomm.kernels._topk_exchange_plan import CLASSES, RADIX, channel_name, k_class, lane_channels, list_class
from flycomm.session import Session
from flycomm.topk.choice import SPLIT_SAVES, choose, split_pays
from flycomm.world import World

LANES = lane_channels(False, 64, 2048)


@pytest.mark.parametrize(
    ("algo", "mode", "rows", "k", "world", "expected"),
    [
        ("auto", "all", 64, 64, 8, ("push", "topk_64")),
        ("auto", "owner", 65, 64, 8, ("radix", RADIX)),
        ("auto", "all", 16, 2048, 8, ("split", "topk_owner_2048")),
        ("auto", "all", 16, 2048, 4, ("push", "topk_2048")),
        ("auto", "all", 7, 2048, 8, ("push", "topk_2048")),
        ("auto", "shard", 16, 2048, 8, ("push", "topk_2048")),
        ("auto", "shard", 17, 2048, 8, ("radix", RADIX)),
        ("split", "all", 1, 65, 2, ("split", "topk_owner_512")),
        ("radix", "all", 1, 1, 2, ("radix", RADIX)),
        ("radix", "owner", 100000, 2048, 8, ("radix", RADIX)),
    ],
)
def test_choice(algo, mode, rows, k, world, expected):
    found = choose(LANES, algo, mode, rows, k, world)
    assert (found.algo, found.wire) == expected
    assert (found.grid, found.capacity) == LANES[found.wire]


def test_split_is_chosen_where_it_saves_more_of_the_wire_than_a_latency_is_worth():
    for world in range(1, 9):
        for k in CLASSES[1:]:
            pushed, split = ((world - 1) * k * 8 * share for share in (1, 2 / world))
            for rows in range(1, 17):
                saves = rows * (pushed - split) > SPLIT_SAVES and rows >= world
                assert split_pays("all", rows, k, world) == saves, (world, k, rows)


@pytest.mark.parametrize("k", [1, 64, 65, 1024, 2048])
def test_a_channel_says_which_lists_it_has_room_for(k):
    grid, capacity = lane_channels(True, 7, k)[RADIX]
    assert (grid.blocks, list_class(capacity, grid.blocks)) == (7, k_class(k))


@pytest.mark.parametrize(("algo", "rows", "k"), [("push", 17, 2048), ("push", 65, 64), ("split", 17, 65)])
def test_too_many_rows_to_push(algo, rows, k):
    with pytest.raises(UsageError, match=rf"{rows} rows with k={k} are over .*; pass algo='radix'$"):  # no init helps
        choose(LANES, algo, "all", rows, k, 8)


@pytest.mark.parametrize("algo", ["auto", "push", "radix"])
def test_a_remedy_is_what_init_takes(algo):
    with pytest.raises(
        UsageError, match=r"are over the 0 .*; pass topk=\(\d+, 8\) to init|pass algo='radix'$"
    ) as caught:
        choose({}, algo, "all", 100, 8, 2)
    assert "topk=(100" not in str(caught.value)


@pytest.mark.parametrize("algo", ["auto", "push", "radix"])
def test_no_channel_for_a_larger_k(algo):
    with pytest.raises(UsageError, match=r"are over the 0 .* pass topk=\(2, 65\) to init"):
        choose(lane_channels(False, 64, 64), algo, "all", 2, 65, 8)
    assert channel_name("all", 65) not in lane_channels(False, 64, 64)


def _kernel(name):
    return Specialization(name, _kernel, 1, "", 1, 64)


def test_virtual_ranks_of_a_gpu_load_kernels_that_differ_together(monkeypatch):
    """The second call finds other kernels wanted, on one rank only: it must neither load nor meet anybody."""
    monkeypatch.setattr(sessions.kernels, "compiled", lambda one: one.kernel)
    preloaded: dict[int, list[str]] = {0: [], 1: []}
    wanted = {0: ["wide", "narrow", "wide"], 1: ["narrow", "narrow", "general"]}

    def body(world):
        def preload(handle, device):
            preloaded[world.rank].append(handle)

        runtime = SimpleNamespace(torch_device_type="cuda")
        one = Session(world, SimpleNamespace(runtime=runtime, preload=preload), "test", False)
        return [one.load_one("call", _kernel(name), lambda: _kernel("general")) for name in wanted[world.rank]]

    assert World.local(2, devices=[0, 0]).run(body, timeout=20.0) == [
        ["wide", "general", "wide"],
        ["narrow", "narrow", "general"],
    ]
    assert preloaded == {0: ["wide", "general"], 1: ["narrow", "general"]}
