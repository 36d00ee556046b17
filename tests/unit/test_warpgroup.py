# SPDX-License-Identifier: Apache-2.0
"""The tile product of four warps as PTX describes ``wgmma``, in NumPy: registers, shared memory, rounding.

From the PTX ISA's chapter on ``wgmma.mma_async``: the layout of A (8-bit elements, m64k32) in registers, the matrix
descriptor, and the canonical K-major layout with a swizzle of 128 bytes.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from flycomm.primitives import _warpgroup_cuda as cuda
from flycomm.primitives import warpgroup
from flycomm.primitives.index_score import DEVIATION

STEPS, STEP = 4, 32  # instructions of a product, bytes of k in each
BASE = 5 << 10  # where B lies in shared memory


def e4m3(values):
    return torch.as_tensor(values, dtype=torch.float32).to(torch.float8_e4m3fn)


def as_bytes(values):
    return values.view(torch.uint8).numpy()


def registers_of_a(keys):
    """(64, 128) bytes → [step][thread][register] as the kernel loads and orders them, each 4 bytes."""
    threads = np.arange(warpgroup.THREADS)
    rows = threads // 32 * 16 + threads % 32 // 4  # warpgroup.row_of
    loaded = keys.reshape(64, 2, 4, 4, 4)  # row, segment, quarter, word, byte
    made = np.empty((STEPS, len(threads), 4, 4), np.uint8)
    for step in range(STEPS):
        for register, (half, segment, word) in enumerate(cuda.words_of(step)):
            made[step, :, register] = loaded[rows + 8 * half, segment, threads % 4, word]
    return made


def a_of_registers(registers):
    """The matrix (64, 32) that one instruction takes, by the ISA's table: element i of a thread."""
    made = np.empty((64, STEP), np.uint8)
    for thread in range(warpgroup.THREADS):
        warp, lane = divmod(thread, 32)
        for i in range(16):
            row = 16 * warp + lane // 4 + (8 if 4 <= i < 8 or i >= 12 else 0)
            column = lane % 4 * 4 + (i & 3) + (16 if i >= 8 else 0)
            made[row, column] = registers[thread, i // 4, i % 4]
    return made


def shared_of(queries):
    """Shared memory with the rows (n, 128) bytes at BASE, as GroupQuery stores their words."""
    memory = np.zeros(BASE + queries.size, np.uint8)
    row, segment, quarter, word = (one.ravel() for one in np.indices((len(queries), 2, 4, 4)))
    begin = BASE + warpgroup.place(row, segment, quarter, word)
    for byte in range(4):
        memory[begin + byte] = queries[row, segment * 64 + quarter * 16 + word * 4 + byte]
    return memory


def b_of_shared(memory, descriptor, columns):
    """The matrix (columns, 32) that a descriptor is of: rows of 128 bytes, eight and eight, swizzled by address."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    assert descriptor >> 62 == 1  # 128-byte swizzle
    assert descriptor >> 49 & 7 == 0  # of a pattern that begins at a multiple of 1024
    n, k = np.indices((columns, STEP))
    address = start + n // 8 * stride + n % 8 * 128 + k
    return memory[address ^ (address >> 7 & 7) << 4]


def descriptors(first, columns):
    """Of each step, as the statement makes them of its last operand."""
    low = ((BASE + first * warpgroup.ROW_BYTES) >> 4) + (cuda.FORM & 0xFFFFFFFF)
    found = re.findall(r"add\.u32 low, \$(\d+), (\d+); mov\.b64 part, \{low, (\d+)\}", cuda.statement(columns))
    assert [int(operand) for operand, _, _ in found] == [columns // 2 + 16] * STEPS
    return [low + int(more) | int(high) << 32 for _, more, high in found]


@pytest.mark.parametrize(("columns", "first"), [(128, 0), (128, 128), (96, 96), (16, 8)])
def test_registers_and_shared_memory_are_those_of_the_instruction(columns, first):
    random = np.random.default_rng(columns)
    keys = e4m3(random.integers(-8, 9, (64, 128)))
    queries = e4m3(random.integers(-8, 9, (first + columns, 128)))
    memory, registers = shared_of(as_bytes(queries)), registers_of_a(as_bytes(keys))
    d = np.zeros((64, columns))
    for step, descriptor in enumerate(descriptors(first, columns)):
        a = torch.as_tensor(a_of_registers(registers[step])).view(torch.float8_e4m3fn).double().numpy()
        b = torch.as_tensor(b_of_shared(memory, descriptor, columns)).view(torch.float8_e4m3fn).double().numpy()
        d += a @ b.T
    assert np.array_equal(d, (keys.double() @ queries[first:].double().T).numpy())


def test_words_of_one_store_or_of_one_read_are_in_different_banks():
    lane = np.arange(32)
    for word in range(4):  # a warp stores eight fragments of four rows; the matrix unit reads 16 bytes of eight rows
        stored = warpgroup.place(lane // 8, lane % 8 // 4, lane % 4, word)
        assert len(set(stored // 4 % 32)) == 32
        read = warpgroup.place(lane // 4, word // 2, lane % 4, word % 2)
        assert len(set(read // 4 % 32)) == 32


def test_statement_has_every_register_once():
    text = cuda.statement(128)
    products = re.findall(r"wgmma\.mma_async\S+ \{([^}]*)\}, \{([^}]*)\}", text)
    assert [one.split(", ") for one, _ in products] == [[f"${i}" for i in range(64)]] * STEPS
    assert ", ".join(one for _, one in products) == ", ".join(f"${64 + i}" for i in range(16))
    assert text.index("wgmma.fence") < text.index("mma_async") < text.index("commit") < text.index("wait_group")


def kept(exact, largest, bits=13):
    """``exact``, cut after so many bits below the first of ``largest``."""
    unit = np.exp2(np.floor(np.log2(np.maximum(largest, 2.0**-100))) - bits)
    return np.trunc(exact / unit) * unit


@pytest.mark.parametrize("weights", ["normal", "positive"])
def test_scores_of_truncated_sums_are_as_near_as_is_said(weights):
    """A model of sm_90's units: 32 products and the sum so far, each cut 13 bits below the first of the largest.
    2^-16.5 with these; were they rounded down, not to zero, 2^-14.5."""
    random = np.random.default_rng(7)
    heads, keys = 16, 400
    q, k = (e4m3(random.standard_normal((n, 128))).double().numpy() for n in (heads, keys))
    w = random.standard_normal(heads)
    w = np.abs(w) if weights == "positive" else w
    total = np.zeros((heads, keys))
    for step in range(STEPS):
        part = slice(step * STEP, step * STEP + STEP)
        addends = np.concatenate([q[:, None, part] * k[None, :, part], total[..., None]], axis=2)
        largest = np.abs(addends).max(2, keepdims=True)
        total = kept(addends, largest).sum(2)
        total = kept(total, np.abs(total))
    off = np.abs(w @ np.maximum(total, 0) - w @ np.maximum(q @ k.T, 0))
    part = off / (np.linalg.norm(k, axis=1) * (np.abs(w) @ np.linalg.norm(q, axis=1)))
    assert DEVIATION["f32"] < part.max() < DEVIATION["fp8"] / 4
