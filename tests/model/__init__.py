# SPDX-License-Identifier: Apache-2.0
"""The protocols as abstract steps, explored in every interleaving; docs/memory_model.md says what this proves."""
