# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/all_reduce.py …`` is ``python -m flycomm bench all_reduce …``; also under torchrun and mpirun."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["all_reduce", *sys.argv[1:]]))
