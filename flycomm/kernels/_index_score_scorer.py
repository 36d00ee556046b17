# SPDX-License-Identifier: Apache-2.0
"""What a scoring kernel is specialised on, and the blocks it suits."""

from dataclasses import dataclass

from flycomm.errors import UsageError
from flycomm.primitives import matrix
from flycomm.primitives.index_score import BLOCK
from flycomm.primitives.index_score_keys import FORMATS
from flycomm.primitives.warpgroup import MOST_COLUMNS
from flycomm.primitives.warpgroup import THREADS as WARPGROUP

KINDS = ("dsa", "block_max")
MATH = ("f32", "fp8")  # how products are summed: primitives.index_score.DEVIATION
_QUERY_BYTES = 32 << 10  # of shared memory: two blocks a multiprocessor, on every target


@dataclass(frozen=True)
class Scorer:
    """What a scoring kernel is specialised on. Raises :class:`UsageError` for what it cannot score."""

    kind: str  # of KINDS
    cache: str  # of index_score_keys.FORMATS
    heads: int  # index heads
    page: int  # tokens
    rows: int = 4  # query rows of a request for which keys are read once
    math: str = "f32"  # of MATH

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.cache not in FORMATS:
            raise UsageError(
                f"kind={self.kind!r} is not one of {', '.join(KINDS)}, or cache={self.cache!r} of {', '.join(FORMATS)}"
            )
        if self.math not in MATH or (self.math == "fp8" and not sums_fp8(self.kind, self.cache, self.heads)):
            raise UsageError(
                f"math={self.math!r} is not one of {', '.join(MATH)}, or not for {self.heads} heads of {self.kind} and "
                f"a {self.cache} cache: fp8 is for dsa, e4m3fn and at most {MOST_COLUMNS} heads"
            )
        unit = matrix.ROWS if self.kind == "dsa" else 1
        if self.heads < 1 or self.heads % unit:
            raise UsageError(f"{self.heads} index heads of {self.kind} are not a multiple of {unit}; pad them")
        if self.page < 1 or (self.kind == "block_max" and self.page % BLOCK):
            raise UsageError(f"pages of {self.page} tokens do not hold blocks of {BLOCK}; use a multiple of these")
        num_bytes = self.rows * self.heads * FORMATS[self.cache].query_bytes
        if not 1 <= self.rows or num_bytes > _QUERY_BYTES:
            raise UsageError(
                f"queries of {self.rows} rows of {self.heads} heads are {num_bytes} bytes, at most {_QUERY_BYTES} fit; "
                "lower rows: more of them are scored in several passes"
            )

    @property
    def name(self) -> str:
        fp8 = "_fp8" * (self.math == "fp8")
        return f"index_scores_{self.kind}_{self.cache}_h{self.heads}_p{self.page}_r{self.rows}{fp8}"


def sums_fp8(kind: str, cache: str, heads: int) -> bool:
    """Whether a :class:`Scorer` may have the ``math`` "fp8"."""
    return kind == "dsa" and cache == "e4m3fn" and heads <= MOST_COLUMNS


def most_rows(cache: str, heads: int) -> int:
    """The largest ``rows`` of a :class:`Scorer`, at most 8."""
    return max(1, min(8, _QUERY_BYTES // (heads * FORMATS[cache].query_bytes)))


def query_dtype(cache: str) -> str:
    """The queries' type: the name of an attribute of torch."""
    element = FORMATS[cache].element
    return "bfloat16" if isinstance(element, str) else element.torch_name


def scales(kind: str, cache: str) -> str:
    """What has a scale in such a cache: "none", a "token", or a "group" of a token's elements."""
    found = FORMATS[cache].scale
    return "none" if found == "token" and kind != "dsa" else found


def best_threads(scorer: Scorer) -> int:
    """Of a block on a GPU, with one for each multiprocessor: as many as have registers for what is loaded ahead."""
    if scorer.math == "fp8":
        return 4 * WARPGROUP
    if scorer.kind == "block_max":
        return 512 if scorer.rows * scorer.heads <= matrix.ROWS else 256
    return 384 if scorer.cache.startswith("e4m3") else 256


def check_threads(scorer: Scorer, threads: int) -> None:
    """Raise :class:`UsageError` for a block in which this cannot be scored."""
    if scorer.math == "fp8" and threads % WARPGROUP:
        raise UsageError(f"{threads} threads a block for fp8 scores; use a multiple of {WARPGROUP}")
