# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of sparse-attention indexers: each rank scores its share of the cached keys."""
