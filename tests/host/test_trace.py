# SPDX-License-Identifier: Apache-2.0
"""``comm.trace``: which events kernels record, in which order, what a file holds, and that nothing is left when off."""

import json
import time
from dataclasses import replace
from itertools import groupby

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

import flycomm.primitives as fc
from flycomm import kernels, targets
from flycomm.channel import TRACE_BYTES
from flycomm.errors import CommTimeout, UsageError
from flycomm.geometry import Geometry
from flycomm.kernels import Specialization, _flydsl, compiled, null_pointer, peers_placeholder
from flycomm.kernels.mono_ffn import Layer, slot_bytes
from flycomm.mono import FfnLayer
from flycomm.primitives.access import load_fragment, store_fragment
from tests.host.test_mono_ffn import SMALL, call, is_right
from tests.ranks import run, same_bits, sample, settle

ROUNDS = 3  # calls in a trace
CALL = {
    "flags": ["call", "post", "arrive", "wait", "take"],
    "packets": ["call", "post", "take"],
    "sentinel": ["call", "post", "take"],
    "two_shot": ["call", "post", "arrive", "wait", "take", "post", "arrive", "wait", "take"],
}


def events(path, rank, words=""):
    """thread name → its events, in the order of their times."""
    made = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in made if e["name"] == "thread_name" and e["pid"] == rank}
    found = {name: [] for name in names.values() if words in name}
    for event in made:
        if event["ph"] != "M" and event["pid"] == rank and words in names[event["tid"]]:
            found[names[event["tid"]]].append(event)
    return {name: sorted(some, key=lambda e: (e["ts"], -e.get("dur", 0))) for name, some in found.items()}


def block_0(path, rank):
    """The events of the first block of the one channel that there are any of: what compares clocks leaves none."""
    found = events(path, rank)
    assert len({name.partition(" block ")[0] for name in found}) == 1
    return next(some for name, some in found.items() if name.endswith(" block 0"))


@pytest.mark.parametrize("protocol", sorted(CALL))
def test_an_all_reduce_by_each_protocol(protocol, tmp_path):
    path, world = tmp_path / "trace.json", 2

    def body(comm):
        x = [sample(comm, (64,), torch.float32, seed) for seed in range(ROUNDS)]
        before = [comm.all_reduce(one) for one in x]
        with comm.trace(path):
            during = [comm.all_reduce(one) for one in x]
        after = [comm.all_reduce(one) for one in x]
        for one, two, three in zip(before, during, after, strict=True):
            assert same_bits(one, two)
            assert same_bits(one, three)

    run(world, body, protocol=protocol)
    data = json.loads(path.read_text())
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"}
    told = data["otherData"]
    assert (told["world"], told["dropped"], len(told["clocks"])) == (world, [0] * world, world)
    for rank in range(world):
        found = block_0(path, rank)
        assert [event["name"] for event in found] == CALL[protocol] * ROUNDS
        epochs = [event["args"]["value"] for event in found if event["name"] == "call"]
        step = 2 if protocol == "two_shot" else 1  # epochs of a call
        assert epochs == [epochs[0] + step * i for i in range(ROUNDS)]
        assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in found)
        slices = {"call", "wait"} if "arrive" in CALL[protocol] else {"call", "take"}
        assert {event["name"] for event in found if event["ph"] == "X"} == slices


def test_a_late_rank_is_seen_waiting_for(tmp_path):
    """Rank 1's wait lasts until rank 0 has arrived, on the common clock."""
    path = tmp_path / "trace.json"

    def body(comm):
        x = sample(comm, (64,), torch.float32, 1)
        with comm.trace(path):
            comm.all_reduce(x)  # loads the kernel: ranks of one process do that together
            if comm.rank == 0:
                time.sleep(0.2)
            comm.all_reduce(x)

    run(2, body, protocol="flags")
    late, early = (block_0(path, rank) for rank in range(2))
    *_, wait = (event for event in early if event["name"] == "wait")
    *_, arrival = (event for event in late if event["name"] == "arrive")
    error = json.loads(path.read_text())["otherData"]["clocks"][1]["uncertain_us"]
    assert wait["dur"] > 100_000
    assert wait["ts"] < arrival["ts"]
    assert wait["ts"] + wait["dur"] >= arrival["ts"] - error


def test_what_finds_no_room_is_dropped_and_counted(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm):
        x = sample(comm, (64,), torch.float32, 1)
        with comm.trace(path, records=160):
            for _ in range(60):
                comm.all_reduce(x)

    run(2, body, protocol="packets")
    made = json.loads(path.read_text())
    assert made["otherData"]["dropped"] == [60 * 5 - 160] * 2  # call, post, take, and the ends of two
    for rank in range(2):
        assert sum(2 if event["ph"] == "X" else 1 for event in block_0(path, rank)) == 160


def text_of(specialization):
    return _flydsl.artifact_of(compiled(specialization))._ir_text


@pytest.mark.host_only
@pytest.mark.parametrize(
    "protocol", ["flags", "packets", *(pytest.param(one, marks=pytest.mark.full) for one in ("sentinel", "two_shot"))]
)
def test_off_a_kernel_has_nothing_of_it(protocol, monkeypatch):
    """The same text before and after its traced form was compiled, and no clock, count or store of a record in it."""
    monkeypatch.setenv("FLYDSL_RUNTIME_ENABLE_CACHE", "0")
    targets.activate(targets.pick())
    one = kernels.all_reduce(2, "f32", Geometry(1, 64), protocol)
    before, traced, after = (text_of(replace(one, kernel=f"{one.kernel}_{i}", traced=i == 1)) for i in range(3))
    assert before == after
    assert (one.name, replace(one, traced=True).name) == (one.name, f"{one.name}_traced")
    assert "llvm.atomicrmw" not in before
    assert "llvm.atomicrmw" in traced
    for word in {"post", "take", "arrive"} & set(CALL[protocol]):
        name = str(int.from_bytes(word.encode(), "little"))
        assert (name in before, name in traced) == (False, True), "names travel in the records"


def build_stages(world, dtype, blocks, threads):
    """out = the sum of x over the ranks, with stages around it."""
    peers = fc.peers_type(world, blocks)

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def stages(comm: peers, x: fx.Pointer, out: fx.Pointer):
        slot = fx.Int32(fx.block_idx.x) * fx.Int32(threads) + fx.Int32(fx.thread_idx.x)
        offset = fx.Int64(slot) * fx.Int64(16)
        call = fc.begin(comm)
        fc.stage(call, "load")
        mine = load_fragment(fx.Int64(fx.ptrtoint(x)) + offset, fx.Float32)
        fc.stage(call, "exchange")
        total = fc.all_reduce_fragment(call, mine, slot)
        fc.stage(call, "store")
        fc.trace.mark(call, "a mark", fx.Int32(fx.block_idx.x) + fx.Int32(40))
        fc.finish(call)
        store_fragment(fx.Int64(fx.ptrtoint(out)) + offset, total)

    @flyc.jit
    def launch(comm: peers, x: fx.Pointer, out: fx.Pointer, stream: fx.Stream):
        stages(comm, x, out).launch(grid=(blocks,), block=(threads,), stream=stream)

    null = null_pointer(fx.Float32, 16)
    return launch, (peers_placeholder(world, blocks), null, null, fx.Stream(None))


def test_stages_of_a_kernel_of_ones_own(tmp_path):
    path, blocks = tmp_path / "trace.json", 3

    def body(comm):
        kernel = compiled(Specialization("stages", build_stages, comm.world_size, "f32", blocks, 64, traced=True))
        x = sample(comm, (blocks * 64 * 4,), torch.float32, 1)
        out = torch.empty_like(x)

        def launch():
            kernel(comm.peers("own"), x.data_ptr(), out.data_ptr(), comm.stream())

        def heads():
            slots, state = comm._session.channels.layout.slots, comm._session.channels.state.cpu()
            return [state[slot.state_offset - TRACE_BYTES : slot.state_offset].any().item() for slot in slots]

        launch()  # nobody listens
        with comm.trace(path):
            launch()
            launch()
            assert all(heads())
        launch()
        assert not any(heads()), "what a trace used may be anybody's memory now"
        comm.check()
        settle()
        assert same_bits(out, comm.all_reduce(x))

    run(2, body, kernel_channels={"own": (blocks, blocks * 64 * 16)})
    for rank in range(2):
        found = events(path, rank, "kernel:own")
        assert len(found) == blocks
        for block, some in enumerate(found.values()):
            names = ["call", "load", "exchange", "post", "arrive", "wait", "take", "store", "a mark"]
            assert [event["name"] for event in some] == names * 2
            assert next(event for event in some if event["name"] == "a mark")["args"]["value"] == 40 + block
            stages = [event for event in some if event["cat"] == "stage"][:3]
            ends = [round(event["ts"] + event["dur"], 2) for event in stages]
            assert ends[:2] == pytest.approx([event["ts"] for event in stages[1:]], abs=0.02)
            assert ends[2] == pytest.approx(some[0]["ts"] + some[0]["dur"], abs=0.02)


@pytest.mark.parametrize("protocol", ["packets", pytest.param("flags", marks=pytest.mark.full)])
def test_a_mono_layer_made_meanwhile(protocol, tmp_path):
    path, layer = tmp_path / "trace.json", Layer(*SMALL, 1, protocol)

    def body(comm):
        with comm.trace(path):
            made = FfnLayer(comm, "ffn", layer, 64)
            first = call(made, comm, 1, shape=SMALL)
        assert all(same_bits(one, two) for one, two in zip(first, call(made, comm, 1, shape=SMALL), strict=True))
        return first

    is_right(run(2, body, kernel_channels={"ffn": (2, slot_bytes(layer))}), 2, 1, shape=SMALL)
    order = ["call", "ready.mark", "ready.wait", "post", "take", "ready.mark", "ready.wait"]
    for rank in range(2):
        blocks = events(path, rank, "kernel:ffn")
        assert len(blocks) == 2
        for some in blocks.values():
            names = [event["name"] for event in some if event["name"] in order]
            assert [name for name, _ in groupby(names)] == order
            stages = [event["name"] for event in some if event["cat"] == "stage"]
            assert stages == ["gate_up", "down", "reduce", "projection"]


def test_the_fused_norm_is_traced(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm):
        x, weight = sample(comm, (2, 64), torch.bfloat16, 1), sample(comm, (64,), torch.bfloat16, 2, 0)
        plain = comm.all_reduce_rms_norm(x, x, weight)
        with comm.trace(path):
            traced = comm.all_reduce_rms_norm(x, x, weight)
        assert all(same_bits(one, two) for one, two in zip(plain, traced, strict=True))

    run(2, body, max_bytes=48 << 20)
    names = [event["name"] for some in events(path, 1).values() for event in some]
    assert names.count("call") >= 1
    assert "take" in names


def test_a_failure_and_a_recovery_meanwhile(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm):
        x = sample(comm, (64,), torch.float32, 1)
        trace = comm.trace(path)
        trace.start()
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.all_reduce(x)
            settle()
            with pytest.raises(CommTimeout):
                comm.check()
        comm.recover()
        comm.all_reduce(x)
        trace.stop()
        comm.all_reduce(x)

    run(2, body, protocol="flags", timeout=0.3)
    assert [sum(event["name"] == "call" for event in block_0(path, rank)) for rank in range(2)] == [3, 2]


def test_a_trace_of_what_failed_is_written_too(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm):
        x = sample(comm, (64,), torch.float32, 1)
        trace = comm.trace(path)
        trace.start()
        comm.all_reduce(x)  # loads the kernel: ranks of one process do that together
        if comm.rank == 0:
            comm.all_reduce(x)
        trace.stop()

    run(2, body, protocol="flags", timeout=0.3)
    waits = [event["dur"] for event in block_0(path, 0) if event["name"] == "wait"]
    assert (len(waits), waits[1] > 250_000) == (2, True), waits


def test_bad_use_is_one_sentence(tmp_path):
    def body(comm):
        with pytest.raises(UsageError, match="records=9 of a block are too few; pass at least 160"):
            comm.trace(tmp_path / "a.json", records=9)
        with pytest.raises(UsageError, match="start it first"):
            comm.trace(tmp_path / "a.json").stop()
        one = comm.trace(tmp_path / "no" / "folder.json")
        one.start()
        with pytest.raises(UsageError, match="one trace at a time"):
            comm.trace(tmp_path / "b.json").start()
        with pytest.raises(UsageError, match=r"rank 0: the trace cannot be written to .*name another file"):
            one.stop()
        with pytest.raises(ZeroDivisionError), comm.trace(tmp_path / "c.json"):
            raise ZeroDivisionError
        assert not (tmp_path / "c.json").exists()
        with comm.trace(tmp_path / "d.json"):
            pass
        comm.barrier()

    run(2, body)
    assert [e for e in json.loads((tmp_path / "d.json").read_text())["traceEvents"] if e["ph"] != "M"] == []
