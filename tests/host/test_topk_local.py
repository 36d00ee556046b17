# SPDX-License-Identifier: Apache-2.0
"""Local top-k against a NumPy oracle, to the bit: values, ties, orders, lengths, geometries, misleading samples."""

from __future__ import annotations

import ctypes
import itertools
import mmap

import numpy as np
import pytest
import torch

import flycomm.ops  # noqa: F401  (registers the op)
from flycomm import targets
from flycomm.errors import UsageError
from flycomm.kernels._topk_plan import HEADER, MAX_COLUMNS, MAX_K, PER_THREAD, plan
from flycomm.ops import topk as ops
from flycomm.ops._topk_arguments import ORDERS as _ORDERS
from flycomm.ops._topk_arguments import TIE_BREAKS
from flycomm.ops.topk import topk_local, topk_workspace
from tests import topk_oracle as oracle
from tests.ranks import DTYPES

ORDERS = list(itertools.product(_ORDERS, TIE_BREAKS))
ROWS, SPLIT = (500, 16), (3000, 40)  # columns and k: one block a row, two blocks a row


def _device() -> str:
    return targets.active().runtime.torch_device_type


def _placed(x: np.ndarray, lengths: np.ndarray, dtype: torch.dtype, wide: bool) -> torch.Tensor:
    """``x`` on the device with a stride of its own, poison after each row's length and between rows."""
    rows, columns = x.shape
    stride = -(-columns // 8) * 8 + (8 if wide else 3)
    poison = np.tile(np.array([np.inf, np.nan, 3e38], np.float32), rows * stride // 3 + 1)[: rows * stride]
    room = poison.reshape(rows, stride).copy()
    for row, length in enumerate(lengths):
        room[row, : max(length, 0)] = x[row, : max(length, 0)]
    return torch.from_numpy(room).to(dtype).to(_device())[:, :columns]


def check(x, k, lengths=None, order="score", tie_break="low", dtype="f32", wide=True, workspace=None):
    """One call against the oracle; returns its three results."""
    rows, columns = x.shape
    visible = np.full(rows, columns) if lengths is None else np.minimum(lengths, columns)
    placed = _placed(x, visible, DTYPES[dtype], wide)
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=_device())
    got = topk_local(placed, k, given, order, tie_break, workspace)
    want = oracle.topk(placed.float().cpu().numpy(), k, visible, order, tie_break)
    for one, expected in zip(got, want, strict=True):
        assert one.shape == expected.shape
        found = one.cpu().numpy()
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), (found, expected)
    return got


def _ragged(columns: int, k: int) -> np.ndarray:
    """Lengths that matter: none, few, about k, odd, all; one below 0 and one beyond the columns."""
    some = (0, 1, k - 1, k, k + 1, columns // 2 | 1, columns - 1, columns, -3, columns + 9)
    return np.array([min(length, columns + 9) for length in some])


@pytest.mark.parametrize("case", [ROWS, SPLIT], ids=["rows", "split"])
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_kinds_of_scores_and_ragged_rows(kind, case):
    columns, k = case
    lengths = _ragged(columns, k)
    check(oracle.scores(kind, lengths.size, columns), k, lengths)


@pytest.mark.parametrize(("order", "tie_break"), ORDERS)
@pytest.mark.parametrize("case", [ROWS, pytest.param(SPLIT, marks=pytest.mark.full)], ids=["rows", "split"])
@pytest.mark.parametrize("kind", ["levels", "constant"])
def test_order_and_ties(kind, case, order, tie_break):
    columns, k = case
    check(oracle.scores(kind, 4, columns), k, np.array([columns, 7, k + 1, columns - 3]), order, tie_break)


def test_index_order_and_high_ties_across_blocks():
    columns, k = SPLIT
    check(oracle.scores("levels", 3, columns), k, np.array([columns, 5, columns - 7]), "index", "high")


@pytest.mark.parametrize("wide", [True, False], ids=["wide", "unaligned"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", ["normal", "some nan", "denormals"])
def test_element_types_and_alignments(kind, dtype, wide):
    columns, k = ROWS
    check(oracle.scores(kind, 4, columns), k, np.array([columns, 9, 0, columns - 5]), dtype=dtype, wide=wide)


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", True), pytest.param("f16", False, marks=pytest.mark.full)])
def test_element_types_in_long_rows(dtype, wide):
    columns, k = SPLIT
    check(oracle.scores("normal", 3, columns), k, np.array([columns, 5, columns - 7]), dtype=dtype, wide=wide)


@pytest.mark.parametrize(
    ("columns", "k"), [(40, 1), (40, 64), (700, 65), (1000, 512), (3000, 300), (3001, 2048), (9001, 2047)]
)
@pytest.mark.parametrize("kind", ["normal", "levels"])
def test_classes_of_k(columns, k, kind):
    check(oracle.scores(kind, 2, columns), k, np.array([columns, columns - 1]), wide=False)


def test_no_rows_and_no_columns():
    check(np.zeros((0, 8), np.float32), 3)
    check(np.zeros((2, 0), np.float32), 3)
    check(np.zeros((2, 1), np.float32), 1)


def test_several_batches_a_block():
    check(oracle.scores("narrow", 2, 9000), 50, np.array([9000, 5001]))


# ---- the sample of a long row


def _sampled(columns: int, k: int) -> np.ndarray:
    """The columns that the blocks of a row of f32 take their sample from."""
    chosen = ops._plan(columns, k)
    units = PER_THREAD["sample"] // 4 * chosen.threads
    return (4 * (np.arange(units) * (columns // 4) // units)[:, None] + np.arange(4)).ravel()


def _misled(columns: int, k: int, too_many: bool) -> np.ndarray:
    x = np.random.default_rng(1).random((1, columns)).astype(np.float32)
    if too_many:  # the sample sees only the worst
        x += 1
        x[:, _sampled(columns, k)] -= 1
    else:  # more than enough of the best are in the sample, and nothing like them elsewhere
        x[:, _sampled(columns, k)] += 1
    return x


@pytest.mark.parametrize("too_many", [True, False], ids=["too many", "too few"])
@pytest.mark.parametrize("order", ["score", pytest.param("index", marks=pytest.mark.full)])
def test_a_sample_that_misleads_costs_no_winner(too_many, order):
    columns, k = (32768, 2000) if _device() != "cpu" else (4096, 300)
    x = _misled(columns, k, too_many)
    capacity = PER_THREAD["candidates"] * ops._plan(columns, k).threads
    assert ops._plan(columns, k).blocks > 1
    if too_many:
        assert columns - _sampled(columns, k).size > capacity
    check(x, k, order=order)


@pytest.mark.parametrize("kind", sorted(set(oracle.KINDS) - {"all nan"}))
def test_the_sample_keeps_candidates_few(kind):
    """Ties too: a bound is a rank, so of equal scores it lets only some through."""
    columns, k = (1 << 17, 64) if _device() != "cpu" else (8192, 20)
    workspace = topk_workspace(1, columns, k, _device())
    workspace[HEADER:] = 0xAB
    check(oracle.scores(kind, 1, columns), k, workspace=workspace)
    used = (workspace[HEADER:].view(-1, 8) != 0xAB).any(1).sum().item()
    assert k <= used < PER_THREAD["candidates"] * ops._plan(columns, k).threads


@pytest.mark.host_only
@pytest.mark.parametrize(("kind", "fit"), [("normal", False), ("levels", False), ("rising", True)])
@pytest.mark.parametrize("order", ["score", pytest.param("index", marks=pytest.mark.full)])
def test_candidates_that_registers_hold_and_that_they_do_not(order, kind, fit):
    columns, k = 4096, 300
    workspace = topk_workspace(1, columns, k, _device())
    workspace[HEADER:] = 0xAB
    check(oracle.scores(kind, 1, columns), k, order=order, workspace=workspace)
    used = (workspace[HEADER:].view(-1, 8) != 0xAB).any(1).sum().item()
    threads = ops._plan(columns, k).threads
    assert used < PER_THREAD["candidates"] * threads
    assert (used <= PER_THREAD["held"] * threads) == fit


def test_all_winners_in_one_block():
    x = oracle.scores("normal", 2, 4096)
    x[0, :400] += 20
    x[1, -400:] += 20
    check(x, 300)


# ---- workspaces, repeats, what is read


def test_a_workspace_serves_call_after_call():
    columns, k = SPLIT
    workspace = topk_workspace(3, columns, k, _device())
    for call in range(6):
        lengths = np.random.default_rng(call).integers(0, columns + 1, 3)
        check(oracle.scores("normal", 3, columns, call), k, lengths, workspace=workspace)
        row_bytes = ops._plan(columns, k).row_bytes
        headers = workspace.view(3, row_bytes)[:, :HEADER]
        assert not headers.any(), "the last block leaves the counters at zero"


@pytest.mark.parametrize("case", [ROWS, SPLIT], ids=["rows", "split"])
def test_twenty_repeats_are_the_same_bytes(case):
    columns, k = case
    x = torch.from_numpy(oracle.scores("relu", 3, columns)).to(_device())
    first = [one.cpu() for one in topk_local(x, k)]
    for _ in range(20):
        again = topk_local(x, k)
        assert all(
            torch.equal(one.cpu().view(torch.int32), two.view(torch.int32))
            for one, two in zip(again, first, strict=True)
        )


@pytest.mark.host_only
@pytest.mark.parametrize("warp", [32, 64])
@pytest.mark.parametrize("case", [ROWS, SPLIT, (300, 2), (700, 200)], ids=str)
def test_warps(warp, case, monkeypatch):
    monkeypatch.setenv("FLYCOMM_HOST_WARP", str(warp))
    columns, k = case
    check(oracle.scores("levels", 2, columns), k)
    check(oracle.scores("normal", 2, columns), k)


@pytest.mark.host_only
@pytest.mark.parametrize("columns", [ROWS[0], 4000])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_columns_beyond_the_length_are_not_even_read(columns, dtype):
    page = mmap.PAGESIZE
    element = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    pages = -(-columns * element // page) + 1
    memory = mmap.mmap(-1, 2 * pages * page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    boundary = pages * page
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    where = ctypes.c_void_p(whole.data_ptr() + boundary)
    assert protect(where, ctypes.c_size_t(pages * page), 0) == 0
    for length in (1, 3, columns // 2 + 1):
        begin = boundary - length * element
        x = whole[begin : begin + columns * element].view(DTYPES[dtype])[None]
        x[0, :length] = torch.arange(length).to(DTYPES[dtype])
        lengths = torch.tensor([length], dtype=torch.int32)
        _, ids, counts = topk_local(x, 2, lengths)
        assert counts.tolist() == [min(2, length)]
        assert ids[0, 0] == x[0, :length].float().argmax()
    assert protect(where, ctypes.c_size_t(pages * page), mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("columns", "k"),
    [(8192, 16), pytest.param(8192, 64, marks=pytest.mark.full), pytest.param(40000, 300, marks=pytest.mark.full)],
)
def test_a_gpus_geometry(columns, k, monkeypatch):
    monkeypatch.setattr(ops, "_plan", lambda columns, k: plan(False, columns, k))
    assert ops._plan(columns, k).threads == 1024
    check(oracle.scores("normal", 1, columns), k)
    if columns == 8192:
        check(oracle.scores("levels", 1, columns), k)


@pytest.mark.parametrize("small", [True, False])
def test_plans_hold_what_kernels_rely_on(small):
    for columns, k in itertools.product(
        [1, 63, 64, 65, 1000, 8192, 16385, 1 << 20, MAX_COLUMNS], [1, 64, 65, 512, 2048]
    ):
        one = plan(small, columns, k)
        assert one.columns >= columns
        assert one.columns & (one.columns - 1) == 0
        assert one.k >= k
        assert one.threads in (64, 128, 256, 512, 1024)
        part = one.columns // one.blocks
        assert part % (one.per_thread * one.threads) == 0 or one.blocks == 1
        if one.blocks == 1:
            assert one.per_thread * one.threads >= one.columns
        else:
            assert PER_THREAD["candidates"] * one.threads >= 2 * one.k
        assert one.k <= 8 * one.threads or one.blocks == 1


# ---- the op


def test_under_the_compiler():
    def layer(x, lengths):
        best, ids, counts = torch.ops.flycomm.topk(x * 2, 7, lengths, "index", "high")
        return best + 1, ids, counts

    x = torch.from_numpy(oracle.scores("normal", 2, 100)).to(_device())
    lengths = torch.tensor([100, 5], dtype=torch.int32, device=_device())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, lengths), layer(x, lengths), strict=True):
        assert torch.equal(got, want)


def test_the_fake_has_the_results_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        results = torch.ops.flycomm.topk(torch.empty(3, 50, dtype=torch.bfloat16), 9)
    assert [(tuple(one.shape), one.dtype) for one in results] == [
        ((3, 9), torch.float32),
        ((3, 9), torch.int32),
        ((3,), torch.int32),
    ]


def test_refusals():
    x = torch.zeros(2, 5000, device=_device())
    refused = [
        ({"k": 0}, r"k=0 is not in 1\.\.2048"),
        ({"k": MAX_K + 1}, "k=2049"),
        ({"k": 3, "order": "value"}, "order='value'"),
        ({"k": 3, "tie_break": "first"}, "tie_break='first'"),
        ({"k": 3, "lengths": torch.zeros(2, dtype=torch.int64, device=_device())}, "int64"),
        ({"k": 3, "lengths": torch.zeros(3, dtype=torch.int32, device=_device())}, "of 2 beside"),
        ({"k": 3, "workspace": torch.zeros(16, dtype=torch.uint8, device=_device())}, "16 bytes"),
    ]
    if ops._plan(5000, 3).blocks == 1:  # a GPU's block takes such a row alone
        refused.pop()
    for arguments, message in refused:
        with pytest.raises(UsageError, match=message):
            topk_local(x, **arguments)
    with pytest.raises(UsageError, match="5000 elements apart"):
        topk_local(x.t(), 3)
    with pytest.raises(UsageError, match="3-dimensional"):
        topk_local(x[None], 3)
    with pytest.raises(UsageError, match="int32"):
        topk_local(x.int(), 3)
    with pytest.raises(UsageError, match="over the limit"):
        topk_workspace(1, MAX_COLUMNS + 1, 3, _device())


# ---- everything with everything


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("order", "tie_break"), ORDERS)
@pytest.mark.parametrize(("columns", "k"), [(1000, 1), (1000, 64), (1000, 300), (5000, 16), (5001, 512), (9001, 2048)])
def test_everything(columns, k, order, tie_break, dtype):
    for kind in oracle.KINDS:
        lengths = _ragged(columns, min(k, columns))
        check(oracle.scores(kind, lengths.size, columns), k, lengths, order, tie_break, dtype, wide=columns % 2 == 0)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rows", "columns", "k"), [(64, 700, 16), (17, 3000, 64), (1, 131071, 2048), (2, 1 << 17, 16)])
def test_many_rows_and_long_rows(rows, columns, k):
    for kind in ("normal", "relu", "narrow"):
        check(oracle.scores(kind, rows, columns), k)
