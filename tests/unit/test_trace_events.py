# SPDX-License-Identifier: Apache-2.0
"""From records to a trace file, and clocks compared by barriers: arithmetic, on records made by hand."""

from __future__ import annotations

import json
import random
import struct

import pytest

from flycomm.errors import UsageError
from flycomm.primitives import trace
from flycomm.trace import plot
from flycomm.trace.events import RankTrace, Record, Track, chrome, offset, parse

HZ = 1_000_000  # so that a tick is a microsecond


def records(*rows):
    return tuple(Record(clock, kind, value, name) for clock, kind, name, value in rows)


ONE_CALL = records(
    (100, "begin", "call", 7),
    (101, "stage", "first", 0),
    (103, "mark", "post", 5),
    (110, "stage", "second", 0),
    (111, "begin", "wait", 0),
    (119, "end", "wait", 0),
    (130, "end", "call", 0),
)


def file_of(*tracks, rounds=((0, 1),)):
    return chrome([RankTrace(HZ, tracks, rounds)], {"target": "host", "arch": "x"})


def test_layout():
    assert (trace.region_bytes(3, 10), trace.block_offset(2, 10)) == (3 * 11 * 32, 2 * 11 * 32)
    data = struct.pack("<qIi16s", 5, trace.KINDS.index("end"), -1, b"sixteen letters.")
    assert len(data) == trace.RECORD_BYTES
    assert parse(data * 2) == (Record(5, "end", -1, "sixteen letters."),) * 2
    assert parse(struct.pack("<qIi16s", 1, 0, 2, b"a")) == (Record(1, "mark", 2, "a"),)


def test_slices_moments_and_stages():
    made = file_of(Track("flags", 3, ONE_CALL, 0))
    named = [event for event in made["traceEvents"] if event["ph"] == "M"]
    assert [event["args"]["name"] for event in named] == ["rank 0", "flags block 3"]
    found = [
        (e["name"], e["ph"], e["ts"], e.get("dur"), e["args"]["value"]) for e in made["traceEvents"] if e["ph"] != "M"
    ]
    assert found == [
        ("call", "X", 0, 30, 7),
        ("first", "X", 1, 9, 0),
        ("post", "i", 3, None, 5),
        ("second", "X", 10, 20, 0),
        ("wait", "X", 11, 8, 0),
    ]
    assert made["otherData"]["dropped"] == [0]
    json.dumps(made)


def test_what_has_no_end_goes_on_to_the_last_record():
    cut = file_of(Track("flags", 0, ONE_CALL[:5], 2))
    wait = next(event for event in cut["traceEvents"] if event["name"] == "call")
    assert wait["dur"] == 11
    assert wait["args"]["unfinished"]
    assert cut["otherData"]["dropped"] == [2]


def test_an_end_without_a_begin_is_passed_over():
    assert [e["name"] for e in file_of(Track("x", 0, ONE_CALL[5:6], 0))["traceEvents"]] == [
        "process_name",
        "thread_name",
    ]


@pytest.mark.parametrize("shift", [-1_000_000, -3, 0, 25, 5_000_000_000])
def test_clocks_are_aligned_within_what_is_said(shift):
    """A model of barriers: everybody arrives at some time, and leaves after the last has, and the link."""
    chance = random.Random(shift)
    mine, theirs = [], []
    for turn in range(32):
        arrivals = [1000 * turn + chance.randint(0, 50) for _ in range(2)]
        departures = [max(arrivals) + chance.randint(1, 4) for _ in range(2)]
        mine.append((arrivals[0], departures[0]))
        theirs.append((arrivals[1] - shift, departures[1] - shift))
    ranks = [RankTrace(HZ, (), tuple(rounds)) for rounds in (mine, theirs)]
    found, error = (1e6 * one for one in offset(*ranks))
    assert abs(found + ranks[0].base - ranks[1].base - shift) <= error
    assert error < 60


def test_clocks_since_1970_keep_their_nanoseconds():
    start = 1_796_050_000_123_456_789
    track = Track("f", 0, records((start + 5, "begin", "a", 0), (start + 12, "end", "a", 0)), 0)
    made = chrome([RankTrace(1_000_000_000, (track,), ((start, start + 9),))], {})
    assert made["traceEvents"][-1]["dur"] == 0.007


def test_clocks_of_two_rates_share_a_file():
    first = RankTrace(1_000_000, (Track("f", 0, records((50, "mark", "a", 0)), 0),), ((0, 10), (40, 50)))
    other = RankTrace(
        1_000_000_000,
        (Track("f", 0, records((9_060_000, "mark", "b", 0)), 0),),
        ((9_000_000, 9_010_000), (9_040_000, 9_050_000)),
    )
    made = chrome([first, other], {})
    times = {event["name"]: event["ts"] for event in made["traceEvents"] if event["ph"] == "i"}
    assert times == {"a": 0, "b": pytest.approx(10, abs=1e-3)}
    assert made["otherData"]["clocks"][1]["uncertain_us"] == pytest.approx(10)


def test_a_name_that_does_not_fit_is_refused():
    for name in ("seventeen letters", "größe"):
        with pytest.raises(UsageError, match="at most 16 ASCII characters"):
            trace.mark(None, name)


def test_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from flycomm.__main__ import main

    path = tmp_path / "a.json"
    path.write_text(json.dumps(file_of(Track("flags", 0, ONE_CALL, 0), Track("packets", 1, ONE_CALL, 1))))
    assert main(["trace", str(path), "--channel", "pack"]) == 0
    assert path.with_suffix(".png").stat().st_size > 1000
    assert main(["trace", str(path), "--channel", "nothing"]) == 2
    assert "name another" in capsys.readouterr().err
    for text in ("[]", "{", "{}"):
        path.write_text(text)
        with pytest.raises(UsageError, match="is not a trace"):
            plot.load(path)
