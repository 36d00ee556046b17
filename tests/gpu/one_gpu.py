# SPDX-License-Identifier: Apache-2.0
"""``one_gpu.py PROGRAM …`` runs a program on a rank that sees one GPU only, so that every rank counts its own as 0."""

from __future__ import annotations

import os
import runpy
import sys

VISIBLE = "CUDA_VISIBLE_DEVICES"  # HIP reads it too

rank = int(os.environ["LOCAL_RANK"])
shown = os.environ.get(VISIBLE)
os.environ[VISIBLE] = shown.split(",")[rank] if shown else str(rank)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
