# SPDX-License-Identifier: Apache-2.0
"""Litmus tests of the order in which peers see each other's stores: many rounds in a launch, outcomes counted.

A round is a call of the channel: the ranks meet, so that all that earlier rounds wrote is there and nobody reads any
more; then every thread does its part of the shape (:mod:`flycomm.kernels._litmus_shapes`) with its own locations, and
tells the partner what it saw. The next meeting carries that, and each thread counts what both saw.

Arguments of a launch: ``(comm, partner, target, counts, rounds, seed, spread, stream)``. ``partner``, ``target``
(i64): the segments of the ranks that this one is compared with and writes to. ``counts``: (grid · threads, OUTCOMES)
u32, added to. ``rounds``, ``seed`` (i32), ``spread`` (i64, ticks): how many, and how late groups of threads may begin.
"""

from collections.abc import Callable
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

import flycomm.primitives as fc
from flycomm.channel import staging_base
from flycomm.kernels import _litmus_plan as plan
from flycomm.kernels._launch import null_pointer, peers_placeholder
from flycomm.kernels._litmus_round import Round
from flycomm.kernels._litmus_shapes import RACES
from flycomm.kernels._specialization import Specialization
from flycomm.primitives import signal
from flycomm.primitives.access import load_element, load_relaxed, store_element, store_relaxed
from flycomm.primitives.call import Call, again


def litmus(world: int, shape: str, order: str, blocks: int, threads: int) -> Specialization:
    """``threads`` a block: a multiple of 128. All blocks wait for peers, so all must be resident."""
    return Specialization(f"litmus_{shape}_{order}", _build(shape, order), world, "", blocks, threads)


@flyc.jit
def _rounds(call: Call, rounds: Any, body: Callable[..., Any]) -> None:
    """``body(one, previous, turn, saw)`` for every round and once more; ``saw`` (u32) is what the round before gave."""
    epoch, ok, found = call.entered, call.live, call.entered
    turn = fx.Int32(0)
    saw = fx.Uint32(0)
    while turn <= rounds:
        one = again(call, epoch, ok, turn == rounds)
        ok, found, saw = body(one, epoch, turn, saw)
        epoch = one.epoch
        turn = turn + fx.Int32(1)
    call.ok = ok
    call.found = found


@flyc.jit
def _tally(one: Round, due: Any, saw: Any, told: Any, counts: Any) -> None:
    """Count what this thread and its partner's saw in the round before, which told it at ``told`` (i64)."""
    if due:
        word = load_relaxed(told)
        theirs = (signal.epoch_of(word) == one.previous).select(signal.tag_of(word), fx.Uint32(plan.IMPOSSIBLE))
        row = fx.Int64(one.block * fx.Int32(one.threads) + one.thread) * fx.Int64(plan.OUTCOMES)
        place = counts + (row + fx.Int64(saw * fx.Uint32(plan.SIGHTS) + theirs)) * fx.Int64(4)
        store_element(place, load_element(place, fx.Uint32) + fx.Uint32(1))


@flyc.jit
def _race(one: Round, shape: str, order: str, due: Any, told: Any) -> Any:
    saw = fx.Uint32(0)
    if due:
        saw = RACES[shape](one, order)
        store_relaxed(told, signal.pack(one.call.epoch, saw))
    return saw


def _build(shape: str, order: str) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    def build(world: int, dtype: str, blocks: int, threads: int) -> tuple[Any, tuple[Any, ...]]:
        peers = fc.peers_type(world, blocks)
        area = plan.area_bytes(blocks, threads)

        @flyc.kernel(known_block_size=[threads, 1, 1])
        def litmus_test(
            comm: peers,
            partner: fx.Int64,
            target: fx.Int64,
            counts: fx.Pointer,
            rounds: fx.Int32,
            seed: fx.Int32,
            spread: fx.Int64,
        ):
            call = fc.begin(comm)
            base = fx.Int64(staging_base(blocks))
            areas = fc.segment(comm, 0) + base, partner + base, target + base
            writes = fx.Int32(fx.thread_idx.x) // fx.Int32(plan.GROUP) % fx.Int32(2) == fx.Int32(0)
            sees = fx.Boolean(True) if plan.actors(shape, threads) == threads else writes == fx.Boolean(False)
            results = fx.Int64(fx.ptrtoint(counts))

            def body(meeting: Call, previous: Any, turn: Any, saw: Any) -> Any:
                fc.arrive(meeting)
                fc.wait(meeting)
                one = Round(meeting, previous, turn == fx.Int32(0), areas, area, (seed, spread))
                told = fx.Int64(turn & fx.Int32(1)) * fx.Int64(area)  # a partner that is ahead writes the other one
                before = fx.Int64(area) - told
                at = [one.place(where, plan.TOLD, one.thread) for where in areas[:2]]
                _tally(one, meeting.ok & sees & (turn > fx.Int32(0)), saw, at[0] + before, results)
                saw = _race(one, shape, order, meeting.ok & (turn < rounds), at[1] + told)
                fx.gpu.barrier()
                return meeting.ok & (meeting.failed[0] == fx.Int32(0)), meeting.found, saw

            _rounds(call, rounds, body)
            fc.finish(call)

        @flyc.jit
        def launch(
            comm: peers,
            partner: fx.Int64,
            target: fx.Int64,
            counts: fx.Pointer,
            rounds: fx.Int32,
            seed: fx.Int32,
            spread: fx.Int64,
            stream: fx.Stream,
        ):
            litmus_test(comm, partner, target, counts, rounds, seed, spread).launch(
                grid=(blocks,), block=(threads,), stream=stream
            )

        comm = peers_placeholder(world, blocks)
        zero = fx.Int64(0)
        return launch, (comm, zero, zero, null_pointer(fx.Int32, 4), 0, 0, zero, fx.Stream(None))

    return build
