# SPDX-License-Identifier: Apache-2.0
"""Inputs and expected results of any size in no time: a pattern, made and reduced on the CPU, over and over.

Its length is a prime, so that nothing which is in the wrong place by a fragment, a block or a shard looks right.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flycomm.bench.collective import Collective
from flycomm.bench.contender import Context
from flycomm.bench.problem import BUFFERS, Case, Problem
from flycomm.bench.reference import DTYPES, Verdict, make_input, reduce_in_rank_order, worst

DTYPE = "bf16"  # what is measured; a protocol's cost is in bytes
_LENGTH = 65_537  # elements


class Tiles:
    """The patterns of every rank and buffer, and their sums, on one rank's device."""

    def __init__(self, world: int, device: torch.device):
        made = [
            [make_input(rank, buffer, _LENGTH, DTYPES[DTYPE]) for rank in range(world)] for buffer in range(BUFFERS)
        ]
        self.inputs = [[one.to(device) for one in terms] for terms in made]
        self.sums = [reduce_in_rank_order(terms).to(device) for terms in made]


class Tiled(Problem):
    """A problem of ``num_bytes`` a rank's share, with results compared where they are."""

    def __init__(self, context: Context, tiles: Tiles, num_bytes: int):
        self.case = self.case_of(num_bytes)
        what, world, rank = context.collective, context.world.size, context.world.rank
        share = num_bytes // DTYPES[DTYPE].itemsize
        count = what.input_numel(share, world)
        self.inputs = [_repeated(terms[rank], 0, count) for terms in tiles.inputs]
        self.bounds = [None] * BUFFERS
        self.expected = [
            _expected(what, terms, total, rank, share) for terms, total in zip(tiles.inputs, tiles.sums, strict=True)
        ]

    @staticmethod
    def case_of(num_bytes: int) -> Case:
        return Case(num_bytes, DTYPE)

    def judge(self, results: Mapping[int, torch.Tensor], exact: bool) -> Verdict:
        """To the bit, whatever ``exact`` says."""
        return worst([_compare(result.view(-1), self.expected[index]) for index, result in results.items()])


def _expected(what: Collective, terms: list[torch.Tensor], total: torch.Tensor, rank: int, share: int) -> torch.Tensor:
    if what.name == "all_gather":
        return torch.cat([_repeated(one, 0, share) for one in terms])
    return _repeated(total, rank * share if what.name == "reduce_scatter" else 0, share)


def _repeated(tile: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Elements ``start`` to ``start + count`` of the endless pattern."""
    turned = tile.roll(-(start % tile.numel()))
    return turned.repeat(-(-count // tile.numel()))[:count]


def _compare(result: torch.Tensor, expected: torch.Tensor) -> Verdict:
    if torch.equal(result.view(torch.int16), expected.view(torch.int16)):
        return Verdict(True, 0.0)
    difference = (result.float() - expected.float()).abs().nan_to_num(nan=float("inf"))
    return Verdict(False, float(difference.max()))
