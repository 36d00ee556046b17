# SPDX-License-Identifier: Apache-2.0
"""The one benchmark harness: ``python -m flycomm bench all_reduce …``; ``benchmarks/`` has thin scripts over it.

========== ===========================================================================================
units      ``8KiB`` to bytes and back; lists
reference  inputs that every rank can make for every rank, and what their sum must be
contender  what is timed: one interface for flycomm and for what it is compared with
baselines  what it is compared with, by name
timing     wall clock, events, replays of a captured graph
stats      median over repeats, slowest rank, skew
harness    a case: check the result first, then time
floors     what no kernel can beat: an empty launch, a flag's way, a copy's rate (``floor_kernels``)
rows       JSON lines
report     table; ``plot``: PNG
run        every case and every baseline, on one rank
ranks      torchrun, mpirun, or virtual ranks
cli        the command
========== ===========================================================================================

All contenders run under the same rules: different inputs on every rank, several input and output buffers in turn,
warm-up outside the timed part, the result compared with f32 summation in rank order before anything is timed, the
slowest rank counts.
"""
