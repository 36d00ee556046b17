# SPDX-License-Identifier: Apache-2.0
"""Which baselines an option means, and what can be said of them without running any."""

from __future__ import annotations

import pytest

from flycomm.bench.baselines import REGISTRY, wanted
from flycomm.bench.baselines.flashinfer import rows_of
from flycomm.errors import UsageError


def test_every_baseline_is_registered_under_its_own_name():
    for name, variants in REGISTRY.items():
        assert {make().name for make in variants} == {name}


def test_what_the_option_means():
    assert wanted(["all"]) == list(REGISTRY)
    assert wanted(["none"]) == []
    assert "flashinfer_one_shot" not in wanted(["auto"])  # minutes to compile: only when asked for
    assert wanted(["vllm", "gloo"]) == ["vllm", "gloo"]
    with pytest.raises(UsageError, match="'auto'"):
        wanted(["auto", "gloo"])


@pytest.mark.parametrize(
    ("count", "shape"), [(1024, (1, 1024)), (4096, (1, 4096)), (65536, (8, 8192)), (3 * 8192, (3, 8192)), (24, (3, 8))]
)
def test_messages_as_rows_of_a_hidden_state(count, shape):
    assert rows_of(count) == shape
    assert shape[0] * shape[1] == count
