# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/mono_ffn.py …``: ``python -m flycomm bench mono_ffn …``; torchrun, mpirun too."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["mono_ffn", *sys.argv[1:]]))
