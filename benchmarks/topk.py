# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/topk.py …``: ``python -m flycomm bench topk …``; torchrun, mpirun too."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["topk", *sys.argv[1:]]))
