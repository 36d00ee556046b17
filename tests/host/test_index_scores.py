# SPDX-License-Identifier: Apache-2.0
"""Index scores against torch in f64: cache formats, shuffled and unmapped pages, ragged rows, the same bits always."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from flycomm import targets
from flycomm.errors import UsageError
from flycomm.kernels._index_score_task import MAX_REQUESTS, Task
from flycomm.kernels._index_score_walk import each_share
from flycomm.kernels._launch import null_pointer
from flycomm.kernels.index_scores import Scorer, best_threads, most_rows, query_dtype, specialization
from flycomm.primitives import matrix
from flycomm.primitives.access import DEVICE, pointer
from flycomm.primitives.index_score import DEVIATION
from flycomm.primitives.index_score_keys import FORMATS, WIDTH, Cache
from flycomm.primitives.index_score_query import Query
from flycomm.primitives.quant import native
from tests.ranks import same_bits

DSA_FP8 = Scorer("dsa", "e4m3fn", 16, 64, 2)
DSA_GROUP = Scorer("dsa", "e4m3fn", 16, 64, 2, "fp8")
DSA_BF16 = Scorer("dsa", "bf16", 32, 16, 2)
DSA_FP4 = Scorer("dsa", "e2m1", 16, 64, 2)
MAX_BF16 = Scorer("block_max", "bf16", 4, 128, 4)
MAX_FP8 = Scorer("block_max", "e4m3fn", 4, 256, 4)
SENTINEL = 12345.0
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_UNITS = 2.0**-10  # of AMD's 8-bit matrix units, as DEVIATION


@pytest.fixture(autouse=True)
def target():
    chosen = targets.pick()
    targets.activate(chosen)
    return chosen


@dataclass
class Case:
    """A step: pages are dealt out at random, every entry and byte that nobody may read is poison."""

    scorer: Scorer
    lengths: list[list[int]]  # of each request, keys that each of its rows sees
    seed: int = 0
    whole: bool = False  # small integers, whose scores are exact
    page_step: int = 1
    page_first: int = 0
    gap: int = 0  # bytes between keys, and between planes

    def __post_init__(self):
        s, fmt = self.scorer, FORMATS[self.scorer.cache]
        generator = torch.Generator().manual_seed(self.seed)
        most = max([max(one, default=0) for one in self.lengths])
        self.rows = sum(map(len, self.lengths))
        self.queries = self._values((self.rows, s.heads, WIDTH), generator)
        self.weights = torch.randn(self.rows, s.heads, generator=generator)
        if self.whole:
            self.weights = torch.randint(-2, 3, self.weights.shape, generator=generator).float()
        self.token_stride = fmt.key_bytes + self.gap
        self.scale_offset = s.page * self.token_stride + self.gap
        self.page_stride = -(-(self.scale_offset + s.page * 4 + self.gap) // 16) * 16
        needed = [-(-max(one, default=0) // s.page) for one in self.lengths]
        self.table = torch.full(
            (len(needed), self.page_first + max(1, -(-most // s.page)) * self.page_step + 1), 0x7FFFFFFF
        ).int()
        self.table[:, ::2] = -(1 << 20)
        order = torch.randperm(sum(needed) + 2, generator=generator)
        self.pages = torch.full((order.numel(), self.page_stride), 0xFF, dtype=torch.uint8)  # NaN as bf16, e4m3fn, f32
        self.keys = []
        for request, count in enumerate(needed):
            mine, order = order[:count], order[count:]
            entries = self.page_first + torch.arange(count) * self.page_step
            self.table[request, entries] = mine.int()
            self.keys.append(self._fill(mine.tolist(), max(self.lengths[request], default=0), generator))
        self.columns = max(1, most if s.kind == "dsa" else -(-most // 128))

    def _values(self, shape, generator):
        dtype = getattr(torch, query_dtype(self.scorer.cache))
        if self.whole:
            return torch.randint(-2, 3, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    def _fill(self, pages, length, generator):
        """Write ``length`` keys; returns them, with their scales, in f64."""
        s, fmt = self.scorer, FORMATS[self.scorer.cache]
        if s.cache == "e2m1":
            codes = torch.randint(0, 16, (length, WIDTH), generator=generator).to(torch.uint8)
            scales = torch.randint(125, 130, (length, 4), generator=generator).to(torch.uint8)
            raw = codes[:, 0::2] | codes[:, 1::2] << 4
            exact = torch.cat([MAGNITUDES, -MAGNITUDES]).double()[codes.long()].view(length, 4, 32)
            keys, factors = (exact * torch.exp2(scales.double() - 127)[..., None]).view(length, WIDTH), 1.0
        else:
            values = self._values((length, WIDTH), generator)
            raw, keys = values.view(torch.uint8), values.double()
            scales, factors = None, 1.0
            if fmt.scale == "token" and s.kind == "dsa":
                scales = torch.rand(length, generator=generator) + 0.5
                scales = torch.ones(length) * 2 if self.whole else scales
                factors = scales.double()[:, None]
                scales = scales[:, None].view(torch.uint8)
        for token in range(length):
            page, slot = self.pages[pages[token // s.page]], token % s.page
            page[slot * self.token_stride :][: fmt.key_bytes] = raw[token]
            if scales is not None:
                page[self.scale_offset + slot * 4 :][:4] = scales[token]
        self.factors = factors
        return keys, factors

    def expected(self, scale):
        """Scores, and what DEVIATION is a part of; NaN where there is none."""
        heads = 1 if self.scorer.kind == "dsa" else self.scorer.heads
        scores = torch.full((self.rows * heads, self.columns), float("nan"), dtype=torch.float64)
        sizes, row = scores.clone(), 0
        for lengths, (keys, factors) in zip(self.lengths, self.keys, strict=True):
            for length in lengths:
                q = self.queries[row].double()
                products, magnitudes = q @ keys.T, q.norm(dim=1)[:, None] * keys.norm(dim=1)
                if self.scorer.kind == "dsa":
                    w = self.weights[row].double()
                    k_scale = torch.ones(keys.shape[0]) if isinstance(factors, float) else factors[:, 0]
                    scores[row, :length] = (k_scale * (w @ products.relu()))[:length]
                    sizes[row, :length] = (k_scale * (w.abs() @ magnitudes))[:length]
                else:
                    for block in range(-(-length // 128)):
                        part = slice(block * 128, min(length, block * 128 + 128))
                        scores[row * heads : (row + 1) * heads, block] = (products[:, part] * scale).amax(1)
                        sizes[row * heads : (row + 1) * heads, block] = (magnitudes[:, part] * abs(scale)).amax(1)
                row += 1
        return scores, sizes


@cache
def handle(scorer, blocks, threads, warp):
    """``warp`` is a key of the cache."""
    kernel = specialization(scorer, blocks, threads)
    return flyc.compile(kernel.launcher(), *kernel.placeholders())


def run(target, case, blocks=3, threads=0, scale=0.5, warp=0, requests=None, pages=None):
    """The plane of scores with its rows' stride, :data:`SENTINEL` where nothing was stored."""
    threads = threads or (128 if case.scorer.math == "fp8" else 64)
    device = target.runtime.torch_device_type
    counts = torch.tensor([len(one) for one in case.lengths], dtype=torch.int32)
    lengths = torch.tensor([length for one in case.lengths for length in one], dtype=torch.int32)
    heads = 1 if case.scorer.kind == "dsa" else case.scorer.heads
    out = torch.full((case.rows * heads, case.columns + 3), SENTINEL, device=device)
    given = [
        case.queries.view(torch.uint8),
        case.weights if case.scorer.kind == "dsa" else None,
        case.pages if pages is None else pages,
        case.table,
        (counts.cumsum(0) - counts).int(),
        counts,
        lengths,
        out,
    ]
    given = [None if one is None else one.to(device) for one in given]
    handle(case.scorer, blocks, threads, warp)(
        *(0 if one is None else one.data_ptr() for one in given),
        len(case.lengths),
        case.table.shape[1],
        case.page_first,
        case.page_step,
        case.columns,
        case.page_stride,
        case.token_stride,
        case.scale_offset,
        out.stride(0),
        scale,
        target.runtime.current_stream(0),
    )
    target.runtime.synchronize(0)
    return given[-1].cpu()


def check(target, case, scale=0.5, **options):
    """One launch against f64: nothing stored where nobody sees a key, near everywhere else, or equal."""
    got = run(target, case, scale=scale, **options)
    want, sizes = case.expected(scale)
    none = torch.nn.functional.pad(want, (0, 3), value=float("nan")).isnan()
    assert (got[none] == SENTINEL).all()
    found = got[:, : case.columns].double()
    if case.whole:
        assert torch.equal(found[~none[:, : case.columns]], want[~want.isnan()])
    units = target.name == "rocm" and FORMATS[case.scorer.cache].element == native(target.capabilities(0).arch)
    limit = FP8_UNITS if units else DEVIATION[case.scorer.math]
    assert ((found - want).abs() <= limit * sizes)[~want.isnan()].all()
    return got


# requests without rows, without keys, with more rows than a pass has, with rows that see less than others
RAGGED = [[100, 99], [0], [37, 38, 39, 40, 41], [], [7, 0, 64]]
BLOCKS = [[300, 299, 128, 129], [1], [], [0, 257, 128, 127, 5], [512]]
CASES = [
    Case(DSA_FP8, RAGGED),
    Case(DSA_GROUP, RAGGED),
    Case(DSA_BF16, RAGGED, page_first=1, page_step=2),
    Case(DSA_FP4, RAGGED, gap=16),
    Case(MAX_BF16, BLOCKS),
    Case(MAX_FP8, BLOCKS, page_first=1, page_step=3, gap=32),
]


def label(case):
    return f"{case.scorer.kind}-{case.scorer.cache}"


def some(count, *cases):
    """The first ``count`` in the quick set."""
    return pytest.mark.parametrize(
        "case", [*cases[:count], *(pytest.param(one, marks=pytest.mark.full) for one in cases[count:])], ids=label
    )


@some(5, *CASES)
def test_scores_are_near_f64(target, case):
    check(target, case)


@some(4, CASES[0], CASES[1], CASES[3], CASES[4])
def test_scores_of_whole_numbers_are_exact(target, case):
    check(target, replace(case, whole=True, seed=1))


@some(2, CASES[0], CASES[1], CASES[4])
def test_no_bit_depends_on_pages_and_grid(target, case):
    """The same keys in other pages, and on another grid."""
    first = run(target, case)
    shuffled = run(target, replace(case, page_first=2, page_step=2, gap=64), blocks=5, threads=256)
    assert same_bits(first, shuffled)


@some(3, CASES[0], CASES[4], CASES[1])
def test_no_bit_depends_on_the_rank_that_scores(target, case):
    """Each of two ranks scores every second page of a request: together they are what one makes of it alone."""
    page = case.scorer.page
    length = 3 * page + 17
    whole = Case(case.scorer, [[length - 1, length]])
    alone = run(target, whole)[:, : whole.columns]
    per_page = page if case.scorer.kind == "dsa" else page // 128
    for rank in range(2):
        share = Case(case.scorer, [[length - 1, length]])
        share.page_first, share.page_step = rank, 2
        local = [sum(min(page, max(0, n - p * page)) for p in range(rank, 4, 2)) for n in share.lengths[0]]
        share.lengths = [local]
        mine = run(target, share)[:, : share.columns]
        for p in range(rank, 4, 2):
            columns = alone[:, p * per_page : (p + 1) * per_page]
            assert same_bits(mine[:, p // 2 * per_page :][:, : columns.shape[1]].contiguous(), columns.contiguous())


@pytest.mark.host_only
@some(2, CASES[0], CASES[4], CASES[3])
def test_waves_of_64_lanes(target, case, monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WARP", "64")
    check(target, case, warp=64, threads=128)


def test_nan_stays_with_its_key(target):
    """relu and max keep it: it ranks last, and no other score has it."""
    for case in (Case(DSA_FP8, [[70]], seed=3), Case(DSA_GROUP, [[70]], seed=3), Case(MAX_BF16, [[300]], seed=3)):
        clean = run(target, case)
        page, slot = case.table[0, 0].item(), 33
        case.pages[page, slot * case.token_stride : slot * case.token_stride + 2] = 0xFF
        spoiled = run(target, case)
        column = slot if case.scorer.kind == "dsa" else 0
        assert spoiled[:, column].isnan().all()
        spoiled[:, column] = clean[:, column]
        assert same_bits(spoiled, clean)


@pytest.mark.host_only
@pytest.mark.parametrize("scorer", [DSA_FP8, DSA_GROUP], ids=lambda one: one.math)
def test_keys_beyond_the_length_are_not_even_read(target, scorer):
    """The last key of the last page ends where memory that nobody may read begins; its scales lie before it."""
    length = 41
    case = Case(scorer, [[length, 3]], seed=4)
    page_bytes = case.page_stride
    boundary = -(-2 * page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, boundary + mmap.PAGESIZE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    begin = boundary - length * case.token_stride  # of the only page
    scales = case.scorer.page * 4
    used = case.pages[case.table[0, 0]]
    room[begin:boundary] = used[: length * case.token_stride]
    room[begin - scales : begin] = used[case.scale_offset : case.scale_offset + scales]
    case.table[0, 0], case.scale_offset = 0, -scales
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    where = ctypes.c_void_p(room.data_ptr() + boundary)
    assert protect(where, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    check(target, case, pages=room[begin:])
    assert protect(where, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE) == 0


@cache
def counting(scorer, blocks, threads):
    """A kernel of somebody's own: how many scores of each row are above 0, and none of them stored."""
    fmt = FORMATS[scorer.cache]

    @flyc.jit
    def add(address, condition):
        if condition:
            fx.atomic_add(pointer(address, fx.Uint32, 4), fx.Uint32(1), syncscope=DEVICE)

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def count(
        q: fx.Pointer, w: fx.Pointer, keys: fx.Pointer, table: fx.Pointer, first: fx.Pointer, rows: fx.Pointer,
        lengths: fx.Pointer, out: fx.Pointer, requests: fx.Int32, stride: fx.Int32, columns: fx.Int32,
        page_stride: fx.Int64, token_stride: fx.Int64, scale_offset: fx.Int64,
    ):  # fmt: skip
        shared = fx.SharedAllocator()
        query = Query(shared, fmt, matrix.layout(), scorer.heads, scorer.rows, threads)
        totals = shared.allocate(fx.Array[fx.Int32, MAX_REQUESTS]).peek().ptr
        at = [fx.Int64(fx.ptrtoint(one)) for one in (q, w, keys, table, first, rows, lengths, out)]

        def sink(begin):
            return lambda row, column, score, inside: add(
                at[7] + fx.Int64(begin + row) * fx.Int64(4), inside & (score > fx.Float32(0.0))
            )

        cache = Cache(fmt, at[2], scorer.page, page_stride, token_stride, scale_offset, fx.Int32(0), fx.Int32(1))
        given = (at[0], at[1], *at[3:7], stride, columns, fx.Float32(1.0))
        each_share(Task(scorer.kind, query, cache, *given, sink), totals, requests, blocks)

    @flyc.jit
    def launch(
        q: fx.Pointer, w: fx.Pointer, keys: fx.Pointer, table: fx.Pointer, first: fx.Pointer, rows: fx.Pointer,
        lengths: fx.Pointer, out: fx.Pointer, requests: fx.Int32, stride: fx.Int32, columns: fx.Int32,
        page_stride: fx.Int64, token_stride: fx.Int64, scale_offset: fx.Int64, stream: fx.Stream,
    ):  # fmt: skip
        count(
            q, w, keys, table, first, rows, lengths, out, requests, stride, columns, page_stride, token_stride,
            scale_offset,
        ).launch(grid=(blocks,), block=(threads,), stream=stream)  # fmt: skip

    return flyc.compile(launch, *[null_pointer(fx.Uint8, 1)] * 8, *[1] * 6, fx.Stream(None))


def test_a_kernel_may_count_scores_instead_of_storing_them(target):
    """So a selection's histogram is there when the last key has been read."""
    case = CASES[0]
    plane = run(target, case)
    want = ((plane > 0) & (plane != SENTINEL)).sum(1)
    device = target.runtime.torch_device_type
    counts = torch.tensor([len(one) for one in case.lengths], dtype=torch.int32)
    lengths = torch.tensor([length for one in case.lengths for length in one], dtype=torch.int32)
    found = torch.zeros(case.rows, dtype=torch.int32, device=device)
    given = [case.queries.view(torch.uint8), case.weights, case.pages, case.table]
    given += [(counts.cumsum(0) - counts).int(), counts, lengths]
    given = [one.to(device) for one in given]
    counting(case.scorer, 3, 64)(
        *(one.data_ptr() for one in (*given, found)),
        len(case.lengths),
        case.table.shape[1],
        case.columns,
        case.page_stride,
        case.token_stride,
        case.scale_offset,
        target.runtime.current_stream(0),
    )
    target.runtime.synchronize(0)
    assert torch.equal(found.cpu(), want.int())


def test_columns_that_the_plane_has_not_are_left_out(target):
    for case in (Case(DSA_FP8, [[50, 51]]), Case(MAX_BF16, [[300]])):
        whole = run(target, case)
        case.columns -= 1
        cut = run(target, case)
        assert same_bits(cut[:, : case.columns].contiguous(), whole[:, : case.columns].contiguous())
        assert (cut[:, case.columns :] == SENTINEL).all()


def test_what_cannot_be_scored():
    refused = [
        (("dsa", "fp8", 64, 64), "cache='fp8' of bf16"),
        (("max", "bf16", 4, 128), "kind='max' is not one of dsa"),
        (("dsa", "bf16", 24, 64), "24 index heads of dsa are not a multiple of 16"),
        (("block_max", "bf16", 4, 64), "pages of 64 tokens do not hold blocks of 128"),
        (("dsa", "bf16", 64, 64, 4), "65536 bytes, at most 32768 fit"),
        (("dsa", "e4m3fn", 64, 64, 4, "f16"), "math='f16' is not one of f32, fp8"),
        (("dsa", "bf16", 64, 64, 2, "fp8"), "not for 64 heads of dsa and a bf16 cache"),
        (("dsa", "e4m3fn", 144, 64, 1, "fp8"), "at most 128 heads"),
    ]
    for arguments, message in refused:
        with pytest.raises(UsageError, match=message):
            Scorer(*arguments)
    with pytest.raises(UsageError, match="1 × 96"):
        specialization(MAX_BF16, 1, 96)
    with pytest.raises(UsageError, match="192 threads a block for fp8 scores; use a multiple of 128"):
        specialization(DSA_GROUP, 1, 192)
    assert [most_rows(one, 64) for one in FORMATS] == [2, 4, 4, 2]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("page", [1, 24, 64, 128])
@pytest.mark.parametrize("name", list(FORMATS))
def test_every_dsa(target, name, page, heads):
    lengths = [*RAGGED, [129], [192, 191, 190, 189]]
    check(target, Case(Scorer("dsa", name, heads, page, most_rows(name, heads)), lengths, seed=heads))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("heads", "rows"), [(16, 1), (16, 3), (16, 8), (32, 4), (48, 3), (64, 1), (64, 4), (128, 2)])
@pytest.mark.parametrize("page", [1, 24, 64, 128])
def test_every_dsa_of_warpgroups(target, page, heads, rows):
    lengths = [*RAGGED, [129], [192, 191, 190, 189]]
    check(target, Case(Scorer("dsa", "e4m3fn", heads, page, rows, "fp8"), lengths, seed=heads), threads=256)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", [1, 4, 16])
@pytest.mark.parametrize("page", [128, 384])
@pytest.mark.parametrize("name", list(FORMATS))
def test_every_block_max(target, name, page, heads):
    check(target, Case(Scorer("block_max", name, heads, page, 4), BLOCKS, seed=heads), scale=-0.25)


@pytest.mark.full
def test_a_gpus_geometry(target):
    lengths = [[700, 699], [], [1000]]
    check(target, Case(DSA_FP8, lengths), blocks=7, threads=best_threads(DSA_FP8))
    check(target, Case(MAX_BF16, lengths), blocks=7, threads=best_threads(MAX_BF16))
