# SPDX-License-Identifier: Apache-2.0
"""A trace of graphs: what is captured in one records every replay in a trace, and nothing outside of one."""

from __future__ import annotations

import torch

from tests.gpu.test_graphs import Captured
from tests.host.test_trace import CALL, events
from tests.ranks import run


def test_a_graph_captured_in_a_trace_records_its_replays(tmp_path):
    paths, replays = [tmp_path / "first.json", tmp_path / "second.json"], (5, 2)

    def body(comm):
        trace = comm.trace(paths[0])
        trace.start()
        captured = Captured(comm, (100,), torch.float32)
        for seed in range(replays[0]):
            captured.check(comm, seed)
        trace.stop()
        for seed in range(10, 13):  # nobody listens
            captured.check(comm, seed)
        with comm.trace(paths[1]):
            for seed in range(20, 20 + replays[1]):
                captured.check(comm, seed)
        comm.check()

    run(2, body, protocol="packets")
    for path, times in zip(paths, replays, strict=True):
        for rank in range(2):
            found = events(path, rank, "packets captured")
            block = next(some for name, some in found.items() if name.endswith(" block 0"))
            assert [event["name"] for event in block] == CALL["packets"] * times
