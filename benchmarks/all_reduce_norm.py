# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/all_reduce_norm.py …``: ``python -m flycomm bench all_reduce_norm …``; torchrun, mpirun too."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["all_reduce_norm", *sys.argv[1:]]))
