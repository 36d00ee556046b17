# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm tune``: which protocol and grid carries a message of how many bytes fastest on these ranks; and
from where on one kernel for several, or sharing a work, pays.

========== ===========================================================================================
candidates the protocols, grids and capacities worth measuring for a size, in stages
tiles      inputs and results of any size, made of a short pattern, so that each is there at once
search     the times of one operation and mode on all ranks: check first, then time
messages   what the search measures: a collective
norms      and the fused norm, beside separate kernels; ``fusing``: which of its candidates pay
crossings  mono launches beside separate kernels, and indexers that share beside those that do not
choice     from times to rows: noise, and neighbours that are alike
crossover  from two times a size to the size at which one way takes over from the other
merge      rows and lines into a table: what was not measured stays
checks     what can be refused before anything is measured
work       what the command was asked for, and how many measurements that is
run        one rank's part of the command, and what all ranks agree on at the end
results    what comes out of it
report     the tables printed
cli        the command; ``options``: what its words mean
========== ===========================================================================================

Times are those of ``flycomm.bench``: several buffers in turn, median over repeats, the slowest rank counts. What a
table is, and how ranks come to use the same, is in the docs ("Dispatch tables").
"""
