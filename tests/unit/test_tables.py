# SPDX-License-Identifier: Apache-2.0
"""Dispatch tables: what is wrong in a file is said in one sentence, and which file is in force."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flycomm
from flycomm import tables, targets
from flycomm.errors import CommError, UsageError
from flycomm.tables import Pays, Row, Table
from flycomm.world import World

ARCH = targets.get("host").capabilities(0).arch
SHIPPED = ("host", "sm_90", "gfx942", "gfx950")
FLAGS = Row("all_reduce", (1, 8), "any", None, "flags", 1, 64, 4096)


def table(*rows: Row, arch: str = ARCH) -> Table:
    """``rows`` for all_reduce, and one row each for the others."""
    others = [replace(FLAGS, op=op) for op in tables.OPS[1:]]
    return Table(arch, "measured", "a test", (*(rows or (FLAGS,)), *others))


def written(path: Path, one: Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(one.to_json())
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no ``FLYCOMM_TABLE``."""
    monkeypatch.delenv("FLYCOMM_TABLE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("arch", SHIPPED)
def test_a_table_reads_as_it_was_written(arch: str):
    one = tables.shipped(arch)
    assert tables.parse(one.to_json(), "it") == one
    assert tables.parse(one.to_json().encode(), "it").digest() == one.digest()


def test_where_mono_kernels_pay_is_part_of_a_table():
    one = replace(table(), mono=(Pays("mono_ffn", (2, 4), 6144, 1024, 8), Pays("mono_ffn", (2, 2), 6144, 2048, 0)))
    assert tables.parse(one.to_json(), "it") == one
    assert one.digest() != table().digest()
    asked = [
        ("mono_ffn", 2, 6144, 1024),
        ("mono_ffn", 2, 6144, 2048),
        ("mono_ffn", 8, 6144, 1024),
        ("x", 2, 6144, 1024),
    ]
    assert [one.pays_up_to(*shape) for shape in asked] == [8, 0, None, None]
    for wrong in (Pays("mono_ffn", (0, 2), 8, 8, 1), Pays("mono_ffn", (1, 2), 8, 8, -1), Pays("x", (1, 2), 0, 8, 1)):
        with pytest.raises(UsageError, match="with a shape of at least 1"):
            tables.parse(replace(one, mono=(wrong,)).to_json(), "it")
    with pytest.raises(UsageError, match="TypeError"):
        tables.parse(one.to_json().replace("1024", "null"), "it")


def test_every_part_of_a_table_is_in_its_digest():
    one = table()
    others = [replace(one, arch="sm_90"), replace(one, rows=one.rows[::-1])]
    others += [replace(one, rows=(replace(FLAGS, blocks=2), *one.rows[1:]))]
    assert len({other.digest() for other in (one, *others)}) == 4


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSONDecodeError"),
        ("{", "JSONDecodeError"),
        (b'"\xff"', "UnicodeDecodeError"),
        ("[]", "TypeError"),
        ("{}", "'rows'"),
        ('{"rows": null}', "TypeError"),
        ('{"rows": [], "arch": "x"}', "'source'"),
        ('{"rows": [{}]}', "'worlds'"),
        ('{"rows": [[1]]}', "TypeError"),
    ],
)
def test_what_is_no_table_is_refused(text: str | bytes, word: str):
    with pytest.raises(UsageError, match=r"^some\.json is not a dispatch table .* make one with python -m") as refused:
        tables.parse(text, "some.json")
    assert word in str(refused.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"blocks": "1"}, "'1' is not a whole number"),
        ({"threads": 64.0}, "64.0 is not a whole number"),
        ({"capacity": None}, "None is not a whole number"),
        ({"largest": "big"}, "'big' is not a whole number"),
        ({"largest": True}, "True is not a whole number"),
        ({"worlds": [1]}, "ValueError"),
        ({"worlds": [1, "8"]}, "'8' is not a whole number"),
        ({"speed": 1}, "'speed'"),
    ],
)
def test_a_row_of_something_else_is_refused(change: dict[str, Any], word: str):
    data = json.loads(table().to_json())
    data["rows"][0] |= change
    with pytest.raises(UsageError, match="is not a dispatch table") as refused:
        tables.parse(json.dumps(data), "it")
    assert word in str(refused.value)


SHORT = replace(FLAGS, largest=8192, capacity=8192)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([replace(FLAGS, worlds=(0, 8))], "worlds of 0 to 8 ranks are not within 1..8"),
        ([replace(FLAGS, worlds=(8, 1))], "worlds of 8 to 1 ranks are not within 1..8"),
        ([replace(FLAGS, worlds=(1, 9))], "worlds of 1 to 9 ranks are not within 1..8"),
        ([replace(FLAGS, op="all_to_all")], "all_to_all, flags or any is not a known operation, protocol or mode"),
        ([replace(FLAGS, protocol="ring")], "all_reduce, ring or any is not a known"),
        ([replace(FLAGS, mode="lazy")], "all_reduce, flags or lazy is not a known"),
        ([replace(FLAGS, op="all_gather", protocol="sentinel")], "sentinel cannot carry all_gather"),
        ([replace(FLAGS, op="reduce_scatter", protocol="two_shot")], "two_shot cannot carry reduce_scatter"),
        ([replace(FLAGS, blocks=0)], "a grid of 0 × 64 is not 1..1024 blocks"),
        ([replace(FLAGS, blocks=1025)], "a grid of 1025 × 64 is not"),
        ([replace(FLAGS, threads=32)], "a grid of 1 × 32 is not"),
        ([replace(FLAGS, threads=96)], "a grid of 1 × 96 is not"),
        ([replace(FLAGS, threads=2048)], "a grid of 1 × 2048 is not"),
        ([replace(FLAGS, capacity=0)], "a capacity of 0 bytes is not a multiple of 4096"),
        ([replace(FLAGS, capacity=6000)], "a capacity of 6000 bytes is not a multiple of 4096"),
        ([replace(SHORT, protocol="packets", capacity=4096), FLAGS], "packets carries 8192 bytes only with that"),
        ([SHORT], r"sizes of all_reduce with 1 ranks are [8192], not ascending from 1 with null at the end"),
        ([SHORT, SHORT, FLAGS], "are [8192, 8192, None], not ascending"),
        ([SHORT, replace(SHORT, largest=4096), FLAGS], "are [8192, 4096, None], not ascending"),
        ([replace(SHORT, largest=0), FLAGS], "are [0, None], not ascending from 1"),
        ([FLAGS, SHORT], "are [None, 8192], not ascending"),
        ([FLAGS, FLAGS], "are [None, None], not ascending"),
        ([replace(FLAGS, worlds=(1, 7))], "sizes of all_reduce with 8 ranks are []"),
        ([replace(FLAGS, mode="graph")], "sizes of all_reduce with 1 ranks are []"),
    ],
)
def test_what_is_wrong_in_a_table_is_said(rows: list[Row], sentence: str):
    with pytest.raises(UsageError) as refused:
        tables.parse(table(*rows).to_json(), "it")
    message = str(refused.value)
    assert message.startswith("it: ")
    assert sentence in message
    assert message.endswith("; make the table again with python -m flycomm tune")


def test_what_is_not_wrong_is_not_refused():
    eager = replace(FLAGS, mode="eager")
    one = table(SHORT, eager, replace(SHORT, mode="graph", largest=1 << 20), replace(FLAGS, mode="graph"))
    assert tables.parse(one.to_json(), "it") == one
    assert [row.mode for row in one.of("all_reduce", 3, True)] == ["any", "graph", "graph"]
    assert [row.mode for row in one.of("all_reduce", 3, False)] == ["any", "eager"]


# ------------------------------------------------------------------ which one is in force


def test_the_shipped_table_without_any_other(cache: Path):
    assert tables.place(ARCH) is None
    assert tables.load(ARCH) is tables.shipped(ARCH)


def test_what_tune_wrote_goes_before_the_shipped_one(cache: Path):
    mine = table(replace(FLAGS, blocks=2))
    assert written(tables.user_path(ARCH), mine) == cache / "flycomm" / f"{ARCH}.json"
    assert tables.load(ARCH) == mine
    assert tables.load("sm_90") is tables.shipped("sm_90"), "it is another chip's"


def test_the_variable_goes_before_what_tune_wrote(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tables.user_path(ARCH), table(replace(FLAGS, blocks=2)))
    asked = table(replace(FLAGS, blocks=3))
    monkeypatch.setenv("FLYCOMM_TABLE", str(written(tmp_path / "asked.json", asked)))
    assert tables.load(ARCH) == asked
    monkeypatch.setenv("FLYCOMM_TABLE", "shipped")
    assert tables.load(ARCH) is tables.shipped(ARCH)


def test_the_argument_goes_before_the_variable(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = written(tmp_path / "asked.json", table(replace(FLAGS, blocks=3)))
    monkeypatch.setenv("FLYCOMM_TABLE", "no/such/file")
    assert tables.load(ARCH, str(asked)).rows[0].blocks == 3
    assert tables.load(ARCH, "shipped") is tables.shipped(ARCH)


def test_without_a_cache_variable_it_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tables.user_path("sm_90") == tmp_path / ".cache" / "flycomm" / "sm_90.json"


def test_a_file_that_cannot_be_read_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for path in (tmp_path / "missing.json", tmp_path):
        monkeypatch.setenv("FLYCOMM_TABLE", str(path))
        with pytest.raises(UsageError, match=r"cannot be read \(.*\); name a file that .* wrote") as refused:
            tables.load(ARCH)
        assert str(path) in str(refused.value)


def test_a_broken_file_is_not_passed_over(cache: Path):
    path = written(tables.user_path(ARCH), table())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UsageError, match="is not a dispatch table"):
        tables.load(ARCH)


def test_the_tests_use_the_shipped_table():
    assert tables.place(ARCH) is None


# ------------------------------------------------------------------ all ranks use rank 0's


def on_all_ranks(size: int, **options: Any) -> list[str]:
    """What every rank of ``size`` was told when it made a communicator; "" where it got one."""

    def rank(world: World) -> str:
        try:
            made = {"fallback": "error", "max_bytes": 1 << 20} | options
            flycomm.init(world=world, target="host", **made).close()
        except CommError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return World.local(size).run(rank)


@pytest.mark.parametrize("by_argument", [True, False])
def test_another_chips_table_is_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_argument: bool
):
    path = written(tmp_path / "other.json", table(arch="sm_90"))
    if by_argument:
        told = on_all_ranks(3, table=path)
    else:
        monkeypatch.setenv("FLYCOMM_TABLE", str(path))
        told = on_all_ranks(3)
    assert (
        told
        == [f"UsageError: rank 0: {path} is for sm_90, this is {ARCH}; make a table here with python -m flycomm tune"]
        * 3
    )


def test_a_broken_table_is_refused_on_all_ranks(tmp_path: Path):
    path = written(tmp_path / "broken.json", table(replace(FLAGS, blocks=0)))
    told = on_all_ranks(2, table=str(path))
    assert len(set(told)) == 1
    assert "a grid of 0 × 64" in told[0]


def test_the_argument_reaches_the_plans_of_all_ranks(tmp_path: Path):
    path = written(tmp_path / "mine.json", table(replace(FLAGS, protocol="two_shot", blocks=2, capacity=8192)))

    def rank(world: World) -> Any:
        with flycomm.init(world=world, target="host", fallback="error", max_bytes=1 << 20, table=path) as comm:
            return comm.plan("all_reduce", torch.float32, 4096).row

    rows = World.local(2).run(rank)
    assert [(row.protocol, row.blocks, row.capacity) for row in rows] == [("two_shot", 2, 8192)] * 2


def test_ranks_that_ask_for_different_tables_are_told(tmp_path: Path):
    path = written(tmp_path / "mine.json", table())

    def rank(world: World) -> str:
        try:
            flycomm.init(world=world, target="host", table=path if world.rank else "shipped").close()
        except CommError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    told = World.local(2).run(rank)
    assert len(set(told)) == 1
    assert told[0].startswith("DisagreementError: ranks differ in ")
    assert "options of flycomm.init" in told[0]
