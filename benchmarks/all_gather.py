# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/all_gather.py …`` is ``python -m flycomm bench all_gather …``; also under torchrun and mpirun."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["all_gather", *sys.argv[1:]]))
