# SPDX-License-Identifier: Apache-2.0
"""Task tables: every tile is somebody's, once, and nobody has more than a share."""

from __future__ import annotations

import pytest

from flycomm.errors import ResidencyError, UsageError
from flycomm.primitives.schedule import ORDERS, deal, share, task_table, turns
from flycomm.residency import check_resident


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tiles", "blocks"), [(1, 1), (1, 5), (7, 3), (6, 3), (768, 132), (5, 8)])
def test_every_tile_is_dealt_once(tiles, blocks, order):
    dealt = deal(tiles, blocks, order)
    assert len(dealt) == blocks
    assert sorted(tile for one in dealt for tile in one) == list(range(tiles))
    assert max(map(len, dealt)) == share(tiles, blocks) == -(-tiles // blocks)
    assert all(list(one) == sorted(one) for one in dealt)
    lengths = [len(one) for one in dealt]
    assert lengths == sorted(lengths, reverse=True), "who has none comes last"


def test_what_the_orders_are():
    assert deal(5, 2) == ((0, 1, 2), (3, 4))
    assert deal(5, 2, "round_robin") == ((0, 2, 4), (1, 3))


def test_a_table_has_the_stages_in_their_order():
    table = task_table({"gate_up": 3, "down": 2}, 2)
    assert table == ((("gate_up", 0), ("gate_up", 1), ("down", 0)), (("gate_up", 2), ("down", 1)))


def test_turns_are_those_of_the_longest_list():
    assert [turns(768, 128, workers) for workers in (1, 4, 6, 8)] == [6, 2, 1, 1]


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(UsageError, match="0 tiles over 4 blocks"):
        deal(0, 4)
    with pytest.raises(UsageError, match="order='random'"):
        deal(4, 4, "random")


def test_residency_is_checked_with_the_numbers():
    check_resident("layer", 132, 1, 132)
    check_resident("layer", 10_000, 8, None)
    with pytest.raises(ResidencyError, match=r"layer: 2 rank\(s\).* 67 blocks .* over the 132 .* at most 66 blocks"):
        check_resident("layer", 67, 2, 132)
