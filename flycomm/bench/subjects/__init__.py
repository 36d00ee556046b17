# SPDX-License-Identifier: Apache-2.0
"""What a run can measure, by name.

================================== ==================================================================================
all_reduce, all_gather,            the collectives (``ours``, ``problem``): sizes in ``--bytes``
reduce_scatter
all_reduce_norm                    ``norm``: all-reduce + residual + RMSNorm, by ``--rows`` and ``--hidden``
moe_finalize_norm                  ``experts``: of the weighted sums of ``--k`` experts' rows, the same
topk                               ``topk``: of one device, by ``--rows``, ``--columns`` and ``--k``; every rank its own
topk_exchange                      ``exchange``: over all ranks' scores, also ``--exchange-mode``, ``--algo``,
                                   ``--given``
mono_ffn                           ``mono``: a feed-forward layer, by ``--rows``, ``--hidden``, ``--intermediate``
indexer                            ``indexer``: scores of a cache and the best of them, by ``--kind``, ``--context``,
                                   ``--requests`` and ``--query-rows``, also ``--format``, ``--heads`` and ``--k``
================================== ==================================================================================

``best`` is what a top-k must find. ``selection`` says whether an indexer's is right: of a cache that ``index_cache``
makes, by scores of ``index_reference``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flycomm.bench import collective
from flycomm.bench.contender import Contender, Context
from flycomm.bench.ours import Flycomm
from flycomm.bench.problem import Case, Checked, Problem
from flycomm.bench.ranks import DEFAULT_WORLD
from flycomm.bench.subjects import exchange, experts, indexer, mono, norm, topk
from flycomm.geometry import SYNC, Geometry


@dataclass(frozen=True)
class Subject:
    """``options``: name and default of those that give its sizes. ``protocol`` and ``grid`` of a call: ``(context,
    case, captured)``; with ``grid`` None there are no floors. ``world``: virtual ranks where no number is given.
    ``read_bytes``: what a rank has to read in a call, where that bounds it: ``(case, ranks)``."""

    contender: Callable[[], Contender]
    problem: Callable[[Context, Case], Checked]
    protocol: Callable[[Context, Case, bool], str]
    grid: Callable[[Context, Case, bool], Geometry] | None
    options: dict[str, str | None]
    world: int = DEFAULT_WORLD
    read_bytes: Callable[[Case, int], int] | None = None


def _protocol(context: Context, case: Case, captured: bool) -> str:
    return Flycomm.plan(context, case, captured).protocol


def _grid(context: Context, case: Case, captured: bool) -> Geometry:
    row = Flycomm.plan(context, case, captured).row
    return SYNC if row is None else row.geometry


_TOPK: dict[str, str | None] = {"rows": "1,16", "columns": "65536", "k": "2048"}
_COLLECTIVE = Subject(Flycomm, Problem, _protocol, _grid, {"bytes": "2KiB,8KiB,32KiB,128KiB"})

SUBJECTS: dict[str, Subject] = {
    **dict.fromkeys(collective.NAMES, _COLLECTIVE),
    "all_reduce_norm": Subject(
        norm.FlycommNorm,
        norm.NormProblem,
        norm.protocol,
        norm.grid,
        {"rows": "1,4,16", "hidden": "4096,6144,7168"},
    ),
    experts.NAME: Subject(
        experts.FlycommExperts,
        experts.ExpertProblem,
        norm.protocol,
        norm.grid,
        {"rows": "1,4,16", "hidden": "4096,7168", "k": "8"},
    ),
    "topk": Subject(topk.FlycommTopk, topk.TopkProblem, topk.protocol, None, _TOPK, 1),
    "topk_exchange": Subject(
        exchange.FlycommExchange,
        exchange.ExchangeProblem,
        exchange.protocol,
        None,
        {**_TOPK, "exchange-mode": "all", "algo": None, "given": None},
    ),
    "mono_ffn": Subject(
        mono.FlycommMono,
        mono.MonoProblem,
        mono.protocol,
        None,
        {"rows": "1,2,4", "hidden": "6144", "intermediate": "1024", "projection": "2048", "grid": None},
        read_bytes=mono.weight_bytes,
    ),
    "indexer": Subject(
        indexer.FlycommIndexer,
        indexer.IndexerProblem,
        indexer.protocol,
        None,
        {
            "kind": "dsa,block_max",
            "context": "65536",
            "requests": "1,4",
            "query-rows": "4",
            "format": "e4m3fn",
            "heads": None,
            "k": None,
        },
        read_bytes=indexer.share_bytes,
    ),
}
