# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/moe_finalize_norm.py …``: ``python -m flycomm bench moe_finalize_norm …``; by torchrun too."""

import sys

from flycomm.bench.cli import main

sys.exit(main(["moe_finalize_norm", *sys.argv[1:]]))
