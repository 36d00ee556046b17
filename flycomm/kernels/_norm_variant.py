# SPDX-License-Identifier: Apache-2.0
"""What a compiled :mod:`flycomm.kernels.reduce_norm` is for, and the staging that it needs: no device, no tensors."""

from dataclasses import dataclass

from flycomm.channel import FRAGMENT_BYTES
from flycomm.dtypes import REDUCIBLE
from flycomm.errors import UsageError
from flycomm.kernels._quantized import QUANTS
from flycomm.primitives import quant
from flycomm.primitives.experts import Experts


@dataclass(frozen=True)
class Variant:
    """What is fixed when the kernel is compiled, beside the grid.

    ``hidden``: elements of the longest row; shorter ones do as well, unless ``exact``. ``single``: there are no more
    rows than blocks. Both save a row's latency. ``weight``: "" for the data type, or "f32". ``gemma``: the factor is
    1 + weight. ``quantize``: one of ``QUANTS``, in ``fp8``; the least scale of a token or group is ``floor``.
    ``normed``: whether ``out`` is written. ``experts``: what a row is the sum of, or None.
    """

    hidden: int
    weight: str = ""
    gemma: bool = False
    quantize: str = "none"
    fp8: quant.Fp8 = quant.E4M3FN
    floor: float = 1.0 / (448.0 * 512.0)
    normed: bool = True
    experts: Experts | None = None
    exact: bool = False
    single: bool = False

    def check(self) -> None:
        """Raise :class:`UsageError` for what there is not."""
        if self.quantize not in QUANTS:
            raise UsageError(f"quantize={self.quantize!r} is not one of {', '.join(QUANTS)}; pass one of these")
        if self.experts is not None:
            self.experts.check()

    @property
    def name(self) -> str:
        """For the name of a specialization."""
        words = [f"h{self.hidden}", "exact" if self.exact else "", "single" if self.single else ""]
        words += [self.weight and f"w_{self.weight}", "gemma" if self.gemma else ""]
        if self.quantize != "none":
            words.append(f"{self.quantize}_{self.fp8.torch_name}")
        if self.experts is not None:
            words.append(self.experts.name)
        return "_".join(filter(None, words))


def each_thread(hidden: int, dtype: str, threads: int) -> int:
    """How many fragments of a row of up to ``hidden`` elements a thread holds."""
    return -(-hidden // (REDUCIBLE[dtype].per_fragment * threads))


def size_for(hidden: int, dtype: str, threads: int) -> tuple[int, bool]:
    """``(hidden, exact)`` of a variant for rows of ``hidden`` elements: sizes that models have, of whole 2 KiB, have
    kernels of their own."""
    per = REDUCIBLE[dtype].per_fragment
    exact = hidden % (128 * per) == 0
    return hidden if exact else each_thread(hidden, dtype, threads) * threads * per, exact


def slot_bytes(rows: int, hidden: int, dtype: str, blocks: int, threads: int) -> int:
    """Of a staging slot for ``rows`` rows of a variant with ``hidden``; packets need twice as much."""
    return -(-rows // blocks) * each_thread(hidden, dtype, threads) * blocks * threads * FRAGMENT_BYTES
