# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/reduce_scatter.py …``: ``python -m flycomm bench reduce_scatter …``; torchrun, mpirun too."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["reduce_scatter", *sys.argv[1:]]))
