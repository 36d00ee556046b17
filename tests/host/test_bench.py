# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness end to end: virtual ranks, processes, and contenders that fail, lie or differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from flycomm import kernels, tables, targets
from flycomm.bench import baselines, cli, floor_kernels, floors, rows
from flycomm.bench.contender import Contender
from flycomm.bench.ours import Flycomm
from flycomm.errors import CommTimeout
from flycomm.memory import SymmetricBuffer
from tests.launch import mpirun, torchrun
from tests.ranks import run

QUICK = ("--calls", "4", "--repeats", "2", "--timeout", "20")
BACKEND = {"host": "gloo", "cuda": "nccl", "rocm": "rccl"}  # of the process group


def _bench(tmp_path: Path, *options: str) -> tuple[int, list[rows.Row]]:
    """The exit code and the rows of the command, in this process."""
    results = tmp_path / "results.jsonl"
    code = cli.main(["all_reduce", "--target", targets.active().name, *QUICK, "--json", str(results), *options])
    return code, rows.load(results) if results.exists() else []


def test_a_row_of_virtual_ranks(tmp_path, capsys):
    code, found = _bench(tmp_path, "--world", "2", "--bytes", "2KiB", "--mode", "eager", "--no-floors")
    assert code == 0
    (row,) = found
    assert list(row) == list(rows.KEYS)
    assert row["what"] == "all_reduce"
    assert row["correct"] is True
    assert row["max_error"] == 0.0
    target = targets.active().name
    assert row["protocol"] in tables.PROTOCOLS
    assert (row["world"], row["bytes"], row["dtype"], row["reduction"]) == (2, 2048, "bf16", "sum")
    assert (row["target"], row["mode"], row["straggler_us"]) == (target, "eager", None)
    assert row["enqueue_us"] > 0
    assert row["spread_us"] >= 0
    assert row["us"] > 0
    assert 0 <= row["skew_us"] < row["us"]
    assert (row["baseline"], row["baseline_us"], row["ratio"]) == (None, None, None)
    assert row["command"].startswith("python -m flycomm bench all_reduce --world 2 --target")
    assert "--json" not in row["command"]
    shown = capsys.readouterr()
    assert "2 KiB" in shown.out
    assert "ok" in shown.out
    assert shown.err == "", "progress is for terminals"


@pytest.mark.parametrize(("world", "dtype"), [(1, "f32"), (3, "bf16"), (8, "f16")])
def test_every_dtype_and_odd_worlds(tmp_path, world, dtype):
    code, found = _bench(tmp_path, "--world", str(world), "--bytes", "20,4100", "--dtype", dtype, "--no-floors")
    assert code == 0
    assert [(row["bytes"], row["correct"]) for row in found] == [(20, True), (4100, True)]


@pytest.mark.parametrize("world", [1, 3])
def test_floors(tmp_path, world):
    code, found = _bench(tmp_path, "--world", str(world), "--bytes", "2KiB,64KiB", "--floors")
    assert code == 0
    times = {(row["protocol"], row["bytes"]): row["us"] for row in found if row["what"] == "floor"}
    several = {"empty", "flag", "copy", "one_shot", "two_shot"}
    assert {name for name, _ in times} == ({"empty"} if world == 1 else several)
    assert all(us > 0 for us in times.values())
    if world > 1:
        assert times["one_shot", 65536] > times["empty", 65536] + times["flag", 0]


def test_a_floor_that_cannot_be_measured_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(floors, "tensor_at", lambda address, num_bytes, device: torch.zeros(num_bytes, device=device))
    code, found = _bench(tmp_path, "--bytes", "2KiB", "--floors")
    assert code == 0
    assert {row["protocol"] for row in found if row["what"] == "floor"} == {"empty", "flag"}
    assert "floors: copy, one_shot could not be measured" in capsys.readouterr().out


def test_a_flag_that_nobody_answers_ends_by_itself():
    def body(comm) -> int:
        target = targets.active()
        buffer = SymmetricBuffer(comm._session.world, target, 4096, name="flag")
        ticks = torch.zeros(1, dtype=torch.int64, device=comm.device)
        if comm.rank == 0:
            stream = target.runtime.current_stream(comm._session.world.device)
            handle = kernels.compiled(floor_kernels.ping_pong())
            limit = target.capabilities(comm._session.world.device).clock_hz // 2
            own, peer = buffer.local_address, buffer.addresses[1] + 128
            handle(own, peer, ticks.data_ptr(), limit, 1, ticks.data_ptr(), stream)
            target.raise_pending()
            target.runtime.synchronize(comm._session.world.device)
        comm._session.world.barrier()
        buffer.close()
        return int(ticks.item())

    assert run(2, body)[0] == -1


# ---------------------------------------------------------------------- contenders that do not do as they should


def test_a_wrong_result_is_not_timed_and_fails_the_command(tmp_path, monkeypatch, capsys):
    right = Flycomm.call

    def wrong(self, index: int) -> torch.Tensor:
        result = right(self, index)
        if index == 3 and self._comm.rank == 1:  # one buffer of one rank, by one bit
            result.view(torch.int16)[7] ^= 1
        return result

    monkeypatch.setattr(Flycomm, "call", wrong)
    code, (row,) = _bench(tmp_path, "--bytes", "2KiB", "--no-floors")
    assert code == 1
    assert (row["correct"], row["us"], row["ratio"]) == (False, None, None)
    assert row["max_error"] > 0
    assert "WRONG" in capsys.readouterr().out


class _Sum(Contender):
    """A baseline of virtual ranks: flycomm's own call, in place."""

    name = "sum"
    does: ClassVar = {"all_reduce": ("sum",)}
    in_place = True
    made: ClassVar[list[str]] = []

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def available(self, context) -> str | None:
        return "it is Sunday" if self._fault == "unavailable" and context.world.rank == 1 else None

    def prepare(self, context, inputs) -> None:
        self._comm = context.comm
        if self._fault == "setup" and context.world.rank == 1:
            raise OSError("no such device\nand more")
        self._buffers = [one.clone() for one in inputs]

    def call(self, index: int) -> torch.Tensor:
        result = self._comm.all_reduce_(self._buffers[index])
        if self._fault == "wrong":
            result += 1
        return result

    def captured(self, context) -> None:
        context.world.barrier()  # a replay waits for its peers, and a capture for its device

    def release(self, context) -> None:
        self.made.append(self._fault)


def _register(monkeypatch, **faults: tuple[str, ...]) -> None:
    """Baselines by name; a fault a variant."""
    variants: dict[str, Any] = {
        name: tuple(lambda fault=fault: _Sum(fault) for fault in kinds) for name, kinds in faults.items()
    }
    monkeypatch.setattr(baselines, "REGISTRY", variants)


def test_baselines_that_fail_are_reported_once_and_have_no_time(tmp_path, monkeypatch, capsys):
    _register(monkeypatch, good=("",), broken=("setup",), absent=("unavailable",), wrong=("wrong",))
    options = ("--bytes", "2KiB,4KiB", "--no-floors", "--against", "broken,good,absent,wrong")
    code, found = _bench(tmp_path, *options)
    assert code == 0, "a baseline's fault is not flycomm's"
    timed = [(row["bytes"], row["baseline"], row["baseline_us"] is not None) for row in found]
    names = ("broken", "good", "absent", "wrong")
    assert timed == [(size, name, name == "good") for size in (2048, 4096) for name in names]
    assert all((row["ratio"] is None) == (row["baseline"] != "good") for row in found)
    assert all(row["correct"] and row["us"] for row in found)
    good = found[1]
    assert good["ratio"] == pytest.approx(good["baseline_us"] / good["us"], rel=1e-3, abs=6e-4)
    out = capsys.readouterr().out
    assert out.count("rank 1: OSError: no such device") == 1
    assert "and more" not in out
    assert "it is Sunday" in out
    assert "the result is wrong by up to 1" in out


def test_of_all_baselines_those_that_cannot_run_are_left_out(tmp_path, monkeypatch):
    _register(monkeypatch, good=("",), absent=("unavailable",))
    _, found = _bench(tmp_path, "--bytes", "2KiB", "--no-floors", "--against", "all")
    assert [row["baseline"] for row in found] == ["good"]


def test_the_better_variant_counts_though_another_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(_Sum, "made", [])
    _register(monkeypatch, best=("setup", "", ""))
    _, (row,) = _bench(tmp_path, "--world", "2", "--bytes", "2KiB", "--no-floors", "--against", "best")
    assert row["baseline_us"] > 0
    assert _Sum.made == [""] * 4, "two variants on two ranks were measured and released"


def test_virtual_ranks_have_no_baselines(tmp_path, capsys):
    code, found = _bench(tmp_path, "--bytes", "2KiB", "--no-floors", "--against", "all")
    assert code == 0
    assert [row["baseline"] for row in found] == [None]
    _, found = _bench(tmp_path, "--bytes", "2KiB", "--no-floors", "--against", "gloo")
    assert (found[-1]["baseline"], found[-1]["baseline_us"]) == ("gloo", None)
    assert "torchrun or mpirun" in capsys.readouterr().out


def test_a_rank_that_stops_calling_ends_the_command(tmp_path, monkeypatch, capsys):
    right = Flycomm.call

    def missing(self, index: int) -> torch.Tensor:
        return self._outputs[index] if self._comm.rank == 1 else right(self, index)

    monkeypatch.setattr(Flycomm, "call", missing)
    code, found = _bench(tmp_path, "--bytes", "2KiB", "--no-floors", "--timeout", "0.5")
    assert code == 2
    assert found == []
    assert "timeout" in capsys.readouterr().err
    assert issubclass(CommTimeout, RuntimeError)


# ---------------------------------------------------------------------- real processes


def _enough_devices(ranks: int) -> str:
    """The active target, if it has a device for each of ``ranks`` processes: NCCL and RCCL want that."""
    target = targets.active()
    if target.name != "host" and target.runtime.device_count() < ranks:
        pytest.skip(f"needs {ranks} devices, has {target.runtime.device_count()}")
    return target.name


def _check_processes(done, results: Path, world: int, launcher: str) -> None:
    backend = BACKEND[targets.active().name]
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_reduce, ") == 1, "one rank prints"
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["bytes"], row["baseline"]) for row in found] == [(2048, backend), (4096, backend)]
    for row in found:
        assert row["correct"] is True
        assert row["world"] == world
        assert row["baseline_us"] > 0
        assert row["ratio"] == pytest.approx(row["baseline_us"] / row["us"], rel=1e-2)
        assert row["command"].startswith(launcher)


def test_under_torchrun(tmp_path):
    target, results = _enough_devices(2), tmp_path / "results.jsonl"
    against = "all" if target == "host" else BACKEND[target]  # on a GPU, all is more than the group's own
    options = ("--target", target, "--bytes", "2KiB,4KiB", "--no-floors", "--against", against, *QUICK)
    done = torchrun("benchmarks/all_reduce.py", 2, *options, "--json", str(results))
    _check_processes(done, results, 2, f"torchrun --nproc-per-node 2 -m flycomm bench all_reduce --target {target}")


@pytest.mark.mpi
def test_under_mpirun(tmp_path):
    target, results = _enough_devices(2), tmp_path / "results.jsonl"
    options = ("--target", target, "--bytes", "2KiB,4KiB", "--no-floors", "--against", BACKEND[target], *QUICK)
    done = mpirun("flycomm", 2, "bench", "all_reduce", *options, "--json", str(results))
    _check_processes(done, results, 2, f"mpirun -n 2 python -m flycomm bench all_reduce --target {target}")


def test_a_world_of_another_size_than_was_started_is_refused():
    done = torchrun("flycomm", 2, "bench", "all_reduce", "--target", targets.active().name, "--world", "3")
    assert done.returncode != 0
    assert "--world 3 does not fit the 2 ranks" in done.stderr
