# SPDX-License-Identifier: Apache-2.0
"""One source, one result: a GPU's sums have the bits that the host target gives for the same inputs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flycomm.tables import PROTOCOLS
from tests.gpu.host_results import WORLDS, results
from tests.launch import launch
from tests.ranks import same_bits

PROGRAM = Path(__file__).with_name("host_results.py")


@pytest.fixture(scope="module")
def of_host(tmp_path_factory):
    file = tmp_path_factory.mktemp("host") / "results.pt"
    command = [sys.executable, str(PROGRAM), str(file)]  # another process, for a process runs one target
    done = launch(command, timeout=100, env={"FLYCOMM_TARGET": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_as_on_the_host(of_host, world, protocol):
    here = results(world, protocol)
    assert here.keys() == of_host[world].keys()
    different = [name for name, total in here.items() if not _same(total, of_host[world][name])]
    assert not different, different


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, but for NaN: which one an operation makes is left to the processor."""
    nan = left.isnan()
    return torch.equal(nan, right.isnan()) and same_bits(left.masked_fill(nan, 0), right.masked_fill(nan, 0))
