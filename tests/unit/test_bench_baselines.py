# SPDX-License-Identifier: Apache-2.0
"""Which baselines an option means, and what can be said of them without running any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flycomm.bench.baselines import REGISTRY, wanted
from flycomm.bench.baselines.flashinfer import rows_of
from flycomm.bench.collective import Collective
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


def _able(what: str, reduction: str | None = None) -> set[str]:
    """The baselines that do this on some machine."""
    context: Any = SimpleNamespace(collective=Collective.of(what, reduction))
    kinds = {name: type(next(iter(variants))()) for name, variants in REGISTRY.items()}
    anywhere = {name: type(name, (kind,), {"available": lambda self, context: None}) for name, kind in kinds.items()}
    return {name for name, kind in anywhere.items() if kind().refusal(context) is None}


def test_who_does_what():
    groups = {"gloo", "nccl", "rccl", "nccl_window"}
    assert _able("all_reduce") == groups | {"torch_one_shot", "torch_two_shot", "flashinfer_one_shot", "vllm"}
    assert _able("all_reduce", "max") == groups
    assert _able("all_gather") == groups | {"torch_low_contention"}
    assert _able("reduce_scatter") == groups | {"torch_low_contention", "torch_reduce_scatter"}
    assert _able("reduce_scatter", "avg") == groups | {"torch_low_contention"}
    ours, fused = {"flycomm_separate", "nccl_compiled"}, {"flashinfer_fused"}
    assert _able("all_reduce_norm") == ours | fused | {"gloo_separate", "nccl_separate", "rccl_separate"}
    assert _able("topk") == {"torch_topk"}
    assert _able("topk_exchange") == {"gloo_gather_topk", "nccl_gather_topk", "rccl_gather_topk"}


def test_a_refusal_names_what_it_does():
    context: Any = SimpleNamespace(collective=Collective.of("all_gather", None))
    (vllm,) = REGISTRY["vllm"]
    assert vllm().refusal(context) == "does all_reduce, not all_gather"
    context.collective = Collective.of("all_reduce", "max")
    assert vllm().refusal(context) == "all_reduce does sum, not max"
