# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/indexer.py …``: ``python -m flycomm bench indexer …``; torchrun, mpirun too."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["indexer", *sys.argv[1:]]))
