# SPDX-License-Identifier: Apache-2.0
"""What the blocks of all ranks did when, as a file for Perfetto; see docs/mono_kernels.md.

``Trace``: one recording, which ``Communicator.trace`` makes; ``events``: from records to the file; ``plot``: a figure.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import torch

from flycomm.channel import TRACE_BYTES
from flycomm.channels import Channels
from flycomm.collectives import Collectives
from flycomm.errors import UsageError
from flycomm.layout import Key
from flycomm.primitives.trace import RECORD_BYTES, block_offset, region_bytes
from flycomm.session import Session
from flycomm.trace.events import RankTrace, Record, Round, Track, chrome, parse
from flycomm.validate import whole

_ROUNDS = 32  # barriers at each end, to compare the ranks' clocks by
_MOST = 1 << 20  # records of a block: 32 MiB
_PER_ROUND = 5  # records of a barrier: call, arrive, wait, its end, the call's


class Trace:
    """A recording from :meth:`start` to :meth:`stop`, or for a ``with`` block. Both are collective, outside captures.

    See :meth:`flycomm.Communicator.trace`.
    """

    def __init__(self, session: Session, collectives: Collectives, path: str | os.PathLike[str], records: int):
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"path={path!r} is not a path; name the file to write")
        if not whole(records) or records > _MOST:
            raise UsageError(f"records={records!r} of a block are not a number up to {_MOST}; pass one")
        if records < _ROUNDS * _PER_ROUND:
            raise UsageError(f"records={records} of a block are too few; pass at least {_ROUNDS * _PER_ROUND}")
        self.path = Path(path)
        self._session = session
        self._collectives = collectives
        self._records = records
        self._buffer: torch.Tensor | None = None
        self._rounds: list[Round] = []

    def start(self) -> None:
        """From here on, what is launched for the first time, and what is captured, is compiled to record."""
        session = self._session
        channels = session.require_channels()
        if session.trace is not None or self._buffer is not None:
            raise UsageError("a communicator records one trace at a time, and a Trace once; stop it, or make another")
        if session.is_capturing():
            raise UsageError("a trace cannot start in a capture; start it before")
        session.world.agree(f"{self._records}".encode(), "records of a trace")
        sizes = [region_bytes(slot.blocks, self._records) for slot in channels.layout.slots]
        self._buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=session.device)
        session.trace = self
        self._collectives.forget()
        self.arm()
        session.synchronize()
        self._rounds = self._compare_clocks(channels)

    def stop(self) -> None:
        """Wait for all ranks and their kernels, end the recording, and write the file: rank 0 does."""
        session = self._session
        session.check_open()
        channels = session.channels
        if session.trace is not self or channels is None:
            raise UsageError("this trace is not being recorded; start it first")
        self._meet()
        session.synchronize()
        tracks = self._read(channels)
        if not session.world.any_of(channels.failed()):  # what led to a failure is worth a file too
            self._rounds += self._compare_clocks(channels)
        self.drop()
        hz = session.target.capabilities(session.world.device).clock_hz
        said = session.world.exchange(_packed(hz, self._rounds, tracks))
        problem = ""
        if session.world.rank == 0:
            arch = session.target.capabilities(session.world.device).arch
            about = {"target": session.target.name, "arch": arch, "world": session.world.size}
            try:
                self.path.write_text(json.dumps(chrome([_unpacked(one) for one in said], about)))
            except OSError as error:
                problem = f"the trace cannot be written to {self.path} ({error.strerror}); name another file"
        if reasons := session.world.vote(not problem, problem):
            raise UsageError("; ".join(reasons))

    def arm(self) -> None:
        """Tell every channel where its records go; again after its state was reset."""
        assert self._buffer is not None
        self._point(self._buffer.data_ptr())

    def drop(self) -> None:
        """End the recording on this rank alone, without a file."""
        self._session.trace = None
        self._collectives.forget()
        self._point(0)
        self._buffer = None

    def __enter__(self) -> Trace:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.stop()
        elif self._session.trace is self:
            self._session.synchronize()
            self.drop()

    def _point(self, address: int) -> None:
        session = self._session
        if session.channels is None:
            return
        for slot in session.channels.layout.slots:
            head = struct.pack("<qq", address, self._records if address else 0)
            place = session.channels.state.data_ptr() + slot.state_offset - TRACE_BYTES
            session.target.memory.write(place, head, session.world.device)
            address += region_bytes(slot.blocks, self._records) if address else 0

    def _meet(self) -> None:
        self._session.world.barrier()

    def _compare_clocks(self, channels: Channels) -> list[Round]:
        """Arrivals at barriers of all ranks, and departures; their records are cleared again.

        No rank launches while another waits for their common device, which would then wait for that launch.
        """
        self._meet()
        for _ in range(_ROUNDS):
            self._collectives.barrier(0)
        self._meet()
        self._session.synchronize()
        found = self._read(channels, only=Key(0, False, "barrier"))[0]
        assert self._buffer is not None
        self._buffer.zero_()
        self._session.synchronize()
        self._meet()
        arrived = [record.clock for record in found.records if record.name == "arrive"]
        left = [record.clock for record in found.records if (record.kind, record.name) == ("end", "wait")]
        return list(zip(arrived, left, strict=True))

    def _read(self, channels: Channels, only: Key | None = None) -> list[Track]:
        """What every block that recorded something did, in the order of the channels. The device is idle."""
        assert self._buffer is not None
        room, tracks, region = self._records, [], 0
        for slot in channels.layout.slots:
            size = region_bytes(slot.blocks, room)
            blocks = self._buffer[region : region + size].view(slot.blocks, block_offset(1, room))
            region += size
            if only not in (None, slot.key):
                continue
            counts = blocks[:, :4].contiguous().view(torch.int32).flatten().tolist()
            for block, count in enumerate(counts):
                if count:
                    kept = min(count, room)
                    data = blocks[block, RECORD_BYTES : RECORD_BYTES * (1 + kept)].cpu().numpy().tobytes()
                    tracks.append(Track(_label(slot.key), block, parse(data), count - kept))
        return tracks


def _label(key: Key) -> str:
    words = [key.wire, f"{key.number}" if key.number else "", "captured" if key.captured else ""]
    if key.capacity and key.geometry.threads:
        words.append(f"{key.geometry.blocks}x{key.geometry.threads}")
    return " ".join(filter(None, words))


def _packed(hz: int, rounds: list[Round], tracks: list[Track]) -> bytes:
    said = [[one.channel, one.block, one.dropped, [list(record) for record in one.records]] for one in tracks]
    return json.dumps([hz, rounds, said]).encode()


def _unpacked(data: bytes) -> RankTrace:
    hz, rounds, said = json.loads(data)
    tracks = tuple(
        Track(channel, block, tuple(Record(*record) for record in records), dropped)
        for channel, block, dropped, records in said
    )
    return RankTrace(hz, tracks, tuple((arrived, left) for arrived, left in rounds))


__all__ = ["Trace"]
