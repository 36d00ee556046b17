# SPDX-License-Identifier: Apache-2.0
"""The one benchmark harness: ``python -m flycomm bench all_reduce …``; ``benchmarks/`` has thin scripts over it.

========== ===========================================================================================
units      ``8KiB`` to bytes and back; lists
reference  inputs that every rank can make for every rank, and what they must reduce to
collective all_reduce, all_gather or reduce_scatter: sizes, and what the result must be
contender  what is timed: one interface for flycomm (``ours``) and for what it is compared with
baselines  what it is compared with, by name
problem    a case's data on one rank
subjects   what can be measured, by name: the collectives, all_reduce_norm, topk, topk_exchange
cases      sizes, from the options that give them
timing     wall clock, events, replays of a captured graph; how long a call takes to return
straggler  one rank late to each call, on the device
stats      median over repeats, slowest rank, skew, spread
harness    a case: check the result first, then time
floors     what no kernel can beat: an empty launch, a flag's way, a copy's rate (``floor_kernels``)
rows       JSON lines; ``origin``: the commit and the command in them
report     table; ``plot``: PNG; ``labels``: titles of both
compare    two runs side by side
run        every case and every baseline, on one rank; ``settings``: which; ``budget``: the memory that they need
ranks      torchrun, mpirun, or virtual ranks
cli        the command; ``options``: what its words mean
========== ===========================================================================================

All contenders run under the same rules: different inputs on every rank, several input and output buffers in turn,
warm-up outside the timed part, the result compared before anything is timed (sums with f32 summation in rank order),
the slowest rank counts.
"""
