# SPDX-License-Identifier: Apache-2.0
"""Results as JSON lines, one a (case, baseline). What is not known, or has no meaning in a row, is null.

======================== =============================================================================================
``what``                 one of ``options.NAMES``, or "floor"
``reduction``            "sum", "avg", "max" or "min"; null where that is not to be chosen
``rows``, ``hidden``     of all_reduce_norm, elements; ``rows``, ``columns``, ``k`` of a top-k, columns a rank's
                         (``k`` of moe_finalize_norm: experts of a row)
``intermediate``,        of mono_ffn, beside rows and hidden: a rank's; ``grid``: blocks x threads, where it was given
``projection``
``exchange_mode``        of topk_exchange: "all", "owner" or "shard"; ``algo``: "push", … where it was given;
                         ``given``: "candidates" where ranks begin with the k best of their own scores
``kind``, ``context``,   of indexer: "dsa" or "block_max"; tokens of a request, requests, query rows of each;
``requests``,            ``heads``, ``k``: where they were given and are not the kind's own
``query_rows``
``target``, ``device``, ``world``, ``dtype`` (of indexer: the format of its cache)
``bytes``                of a rank: the message of an all-reduce, the shard of a gather or scatter, a top-k's scores, an
                         indexer's whole cache
``protocol``             flycomm's (of a top-k how the work is split, of an exchange the channel); "fallback" where it
                         handed over, "separate" where it made one launch a step. In a floor its name: "empty", …
``mode``, ``replay_on``  "graph" or "eager"; the stream of replays, "own" or "default"
``straggler_us``         one rank, another each time, came to each call this late; nothing is subtracted
``us``, ``skew_us``      median of the slowest rank; how much slower it is than the fastest
``rate_gb_s``            bytes that a rank has to read at least (weights, its share of a cache) over ``us``; null where
                         that is not known
``spread_us``            how wide the middle half of the slowest rank's repeats is
``enqueue_us``           CPU time until a call returns, median, slowest rank; in mode eager
``baseline``             by name, with ``baseline_us``, ``baseline_spread_us`` and ``baseline_enqueue_us``
``ratio``                ``baseline_us / us``
``correct``              of flycomm, to the bit (``normed``: within a tolerance, see ``norm``); ``max_error``
``commit``, ``command``  what was measured, and how to do it again
======================== =============================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flycomm.bench.floors import Floor
from flycomm.bench.harness import Outcome
from flycomm.bench.problem import Case
from flycomm.errors import UsageError

Row = dict[str, Any]

KEYS = (
    "what",
    "reduction",
    "target",
    "device",
    "world",
    "bytes",
    "dtype",
    "rows",
    "hidden",
    "intermediate",
    "projection",
    "grid",
    "columns",
    "k",
    "exchange_mode",
    "algo",
    "given",
    "kind",
    "context",
    "requests",
    "query_rows",
    "heads",
    "protocol",
    "mode",
    "replay_on",
    "straggler_us",
    "us",
    "skew_us",
    "spread_us",
    "enqueue_us",
    "rate_gb_s",
    "baseline",
    "baseline_us",
    "baseline_spread_us",
    "baseline_enqueue_us",
    "ratio",
    "correct",
    "max_error",
    "commit",
    "command",
)
# Files from before there was more than one reduction, a straggler, a spread or rows lack these.
_LATER = {"reduction", "straggler_us", "spread_us", "enqueue_us", "baseline_spread_us", "baseline_enqueue_us"}
_LATER |= {"rows", "hidden", "columns", "k", "exchange_mode", "algo", "intermediate", "projection", "grid", "rate_gb_s"}
_LATER |= {"given", "kind", "context", "requests", "query_rows", "heads"}


def of_case(
    common: Mapping[str, Any],
    case: Case,
    protocol: str,
    outcome: Outcome,
    baselines: Mapping[str, Outcome | None],
    read_bytes: int | None = None,
) -> list[Row]:
    """The rows of one case: one a baseline (None: it has no time), or one without a baseline.

    ``common`` has what all rows of a run share: what, reduction, target, device, world, mode, commit, command …
    ``read_bytes``: that a rank reads in a call, for the rate.
    """
    measured = {
        **case.fields(),
        "protocol": protocol,
        "us": _rounded(outcome.us),
        "skew_us": _rounded(outcome.skew_us),
        "spread_us": _rounded(outcome.spread_us),
        "enqueue_us": _rounded(outcome.enqueue_us),
        "rate_gb_s": round(read_bytes / outcome.us / 1000, 1) if read_bytes and outcome.us else None,
        "correct": outcome.correct,
        "max_error": outcome.max_error if math.isfinite(outcome.max_error) else None,
    }
    compared: Sequence[tuple[str | None, Outcome | None]] = list(baselines.items()) or [(None, None)]
    rows = []
    for name, other in compared:
        baseline: Row = {"baseline": name}
        if other is not None:
            baseline["baseline_us"] = _rounded(other.us)
            baseline["baseline_spread_us"] = _rounded(other.spread_us)
            baseline["baseline_enqueue_us"] = _rounded(other.enqueue_us)
        if baseline.get("baseline_us") is not None and outcome.us:
            baseline["ratio"] = round(baseline["baseline_us"] / outcome.us, 3)
        rows.append(_row(common, measured | baseline))
    return rows


def of_floor(common: Mapping[str, Any], floor: Floor) -> Row:
    found: Row = {"what": "floor", "protocol": floor.name, "bytes": floor.num_bytes, "us": _rounded(floor.us)}
    found |= {"reduction": None, "straggler_us": None}
    return _row(common, found)


def _row(common: Mapping[str, Any], found: Mapping[str, Any]) -> Row:
    merged = {**common, **found}
    return {key: merged.get(key) for key in KEYS}


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add lines to a results file; its folder is made if it is missing. Raises :class:`UsageError` if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); name another file for --json") from None


def load(path: Path) -> list[Row]:
    """The rows of a results file. Raises :class:`UsageError` naming the line that is none."""
    rows = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); pass a file that --json wrote") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not set(KEYS) - _LATER <= row.keys():
            raise UsageError(f"line {number} of {path} is not a result row; pass a file that --json wrote")
        rows.append({key: row.get(key) for key in KEYS})
    return rows
