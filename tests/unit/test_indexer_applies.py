# SPDX-License-Identifier: Apache-2.0
"""From which context on ranks share the scoring: a pure function of a table's section."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flycomm import tables
from flycomm.errors import UsageError
from flycomm.indexer.applies import applies
from flycomm.indexer.kinds import Indexer
from flycomm.tables.crossovers import Crossover

LINES = (
    Crossover("dsa", (2, 2), 4, 1000, "measured"),
    Crossover("dsa", (2, 2), None, 100, "modelled"),
    Crossover("dsa", (3, 4), 1, None, "measured"),
    Crossover("dsa", (3, 4), 16, 0, "modelled"),
)
TABLE = replace(tables.shipped("host"), indexer=LINES)


@pytest.mark.parametrize(
    ("kind", "world", "context", "rows", "want"),
    [
        ("dsa", 2, 999, 4, False),
        ("dsa", 2, 1000, 4, True),
        ("dsa", 2, 999, 5, True),
        ("dsa", 2, 99, 5, False),
        ("dsa", 3, 1 << 24, 1, False),  # never
        ("dsa", 4, 0, 2, True),
        ("dsa", 4, 0, 17, True),  # no line: always
        ("block_max", 2, 0, 1, True),
        ("dsa", 1, 1 << 24, 64, False),  # a rank has nobody to share with
    ],
)
def test_the_first_line_that_fits_decides(kind: str, world: int, context: int, rows: int, want: bool):
    assert applies(TABLE, kind, world, context, rows) is want


def test_a_table_with_crossovers_reads_as_it_was_written():
    assert tables.parse(TABLE.to_json(), "it") == TABLE
    assert TABLE.digest() != tables.shipped("host").digest()
    assert '"indexer"' not in tables.shipped("host").to_json()


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
@pytest.mark.parametrize("kind", ["dsa", "block_max"])
def test_in_shipped_tables_more_rows_and_more_ranks_pay_sooner(arch: str, kind: str):
    table = tables.shipped(arch)
    for world in (2, 3, 8):
        starts = []
        for rows in (1, 4, 16, 64):
            starts.append(
                next(context for context in range(0, 1 << 21, 4096) if applies(table, kind, world, context, rows))
            )
        assert starts == sorted(starts, reverse=True)
        assert 0 < starts[-1] < starts[0] <= 1 << 20
    measured = {(line.worlds, line.rows) for line in table.indexer if line.source == "measured"}
    assert measured == ({((2, 2), 4), ((2, 2), 16)} if arch == "sm_90" else set())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"worlds": [0, 2]}, "worlds of 0 to 2 ranks are not within 1..8"),
        ({"source": "guessed"}, "the source of a crossover, 'guessed', is not one of measured, modelled"),
        ({"rows": 0}, "a crossover at 1000 tokens for 0 rows is not"),
        ({"context": -1}, "a crossover at -1 tokens for 4 rows is not"),
        ({"rows": None}, "rows of dsa with (2, 2) ranks are [None, None], not ascending with null at the end"),
        ({"rows": "4"}, "'4' is not a whole number"),
        ({"speed": 1}, "'speed'"),
    ],
)
def test_what_is_wrong_in_a_line_is_said(change: dict[str, Any], sentence: str):
    data = json.loads(TABLE.to_json())
    data["indexer"][0] |= change
    with pytest.raises(UsageError) as refused:
        tables.parse(json.dumps(data), "it")
    assert sentence in str(refused.value)


@pytest.mark.parametrize("change", [{"k": 0}, {"block": 0}, {"lists": 0}, {"forced": (-1, 0)}, {"forced": (2, 3)}])
def test_an_indexer_of_nothing_is_refused(change: dict[str, Any]):
    with pytest.raises(UsageError, match="use at least 1 of each, and at most k forced"):
        replace(Indexer("dsa", 4), **change)
