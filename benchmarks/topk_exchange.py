# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/topk_exchange.py …``: ``python -m flycomm bench topk_exchange …``; torchrun, mpirun too."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["topk_exchange", *sys.argv[1:]]))
