# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of sparse-attention indexers: each rank scores its share of the cached keys.

=============== ================================================================================================
``Indexer``     what is kept: ``DSA``, the best tokens of a row; ``BLOCK_MAX``, the best blocks of each index head
``ShardLayout`` which rank has which tokens
``IndexerCP``   ``plan`` once a step, ``decode`` once a layer
``IndexScores`` scores bf16, fp8 and fp4 caches; a user's own callable may take its place
``applies``     whether sharing pays, by the agreed table
=============== ================================================================================================
"""

from flycomm.indexer.applies import applies
from flycomm.indexer.cp import IndexerCP, Scorer
from flycomm.indexer.kinds import BLOCK_MAX, DSA, Indexer
from flycomm.indexer.plan import StepPlan
from flycomm.indexer.scores import IndexScores
from flycomm.indexer.selection import TopK
from flycomm.indexer.shard import ShardLayout

__all__ = [
    "BLOCK_MAX",
    "DSA",
    "IndexScores",
    "Indexer",
    "IndexerCP",
    "Scorer",
    "ShardLayout",
    "StepPlan",
    "TopK",
    "applies",
]
