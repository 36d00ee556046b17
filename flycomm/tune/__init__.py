# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm tune``: which protocol and grid carries a message of how many bytes fastest on these ranks.

========== ===========================================================================================
candidates the protocols, grids and capacities worth measuring for a size, in stages
tiles      inputs and results of any size, made of a short pattern, so that each is there at once
search     the times of one operation and mode on all ranks: check first, then time
choice     from times to rows: noise, and neighbours that are alike
merge      rows into a table: what was not measured stays
checks     what can be refused before anything is measured
run        one rank's part of the command, and what all ranks agree on at the end
report     the tables printed
cli        the command; ``options``: what its words mean
========== ===========================================================================================

Times are those of ``flycomm.bench``: several buffers in turn, median over repeats, the slowest rank counts. What a
table is, and how ranks come to use the same, is in the docs ("Dispatch tables").
"""
