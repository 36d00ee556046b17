# SPDX-License-Identifier: Apache-2.0
"""A bound launch does what the handle's does, holds what it needs, and refuses what it cannot pass."""

from __future__ import annotations

import ctypes
import gc
import weakref

import flydsl.compiler as flyc
import pytest
import torch

from flycomm import targets
from flycomm.errors import UsageError
from flycomm.kernels import bind, compiled
from tests.host.one_channel import channel, ranks, specialization
from tests.ranks import DTYPES, same_bits

VARYING = (2, 3, 4, 5)  # source, out, count, stream of (comm, tag, source, out, count, stream)
COUNTS = (1, 7, 512, 1000, 8, 1000)


def _loaded(world, spec):
    """The handle, loaded onto the device before anybody launches: loading may wait for a kernel that runs."""
    handle = compiled(spec)
    targets.active().preload(handle, world.device)
    world.barrier()
    return handle


def _place(world):
    target = targets.active()
    kind = target.runtime.torch_device_type
    return "cpu" if kind == "cpu" else f"{kind}:{world.device}", target.runtime.current_stream(world.device)


def _sample(rank, call, count, dtype):
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("protocol", ["flags", "packets", "sentinel"])
def test_the_same_results_as_the_handle(protocol, dtype):
    """Every call from and to other memory, and of another length; ranks are threads that share the kernel."""

    def body(world):
        handle = _loaded(world, specialization(protocol, world.size, dtype))
        where, stream = _place(world)
        with channel(world, protocol) as by_handle, channel(world, protocol) as by_bound:
            bound = bind(handle, (by_bound, 7, None, None, None, None), VARYING)
            noise = [bytearray(64) for _ in range(1000)]  # over what bind may have left unheld
            for call, count in enumerate(COUNTS):
                x = _sample(world.rank, call, count, DTYPES[dtype]).to(where)
                want, got = torch.zeros_like(x), torch.zeros_like(x)
                handle(by_handle, 7, x.data_ptr(), want.data_ptr(), count, stream)
                bound(x.data_ptr(), got.data_ptr(), count, stream)
                targets.active().raise_pending()
                total = sum(_sample(rank, call, count, DTYPES[dtype]).float() for rank in range(world.size))
                assert same_bits(got, want), (call, count)
                assert same_bits(got.cpu(), (total + 0.0).to(DTYPES[dtype])), (call, count)
            del noise

    ranks(3, body)


def test_any_of_the_arguments_may_vary_in_any_order():
    def body(world):
        handle = _loaded(world, specialization("flags", world.size, "f32"))
        where, stream = _place(world)
        x = torch.arange(100, dtype=torch.float32, device=where)
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        with channel(world, "flags") as peers:
            bind(handle, (peers, 7, x.data_ptr(), None, 100, stream), (3,))(first.data_ptr())
            bind(handle, (peers, 7, None, second.data_ptr(), None, stream), (4, 2))(100, x.data_ptr())
            bind(handle, (peers, 7, x.data_ptr(), x.data_ptr(), 100, stream), ())()
            targets.active().runtime.synchronize(world.device)
        assert torch.equal(first, 2 * torch.arange(100.0, device=where))
        assert torch.equal(second, first)
        assert torch.equal(x, first)

    ranks(2, body)


def _alone(body, *, spec=None):
    """``body(bind's kernel, peers, source, out, stream)`` on a world of one."""

    def rank(world):
        where, stream = _place(world)
        handle = _loaded(world, spec or specialization("flags", 1, "f32"))
        x = torch.arange(64, dtype=torch.float32, device=where)
        out = torch.full_like(x, -1)
        with channel(world, "flags") as peers:
            body(handle, peers, x, out, stream)

    ranks(1, rank)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda good: good[:-1],
        lambda good: (*good, 0),
        lambda good: (None, *good[1:]),
        lambda good: (*good[:2], 2**31, good[3]),
        lambda good: (2**64, *good[1:]),
        lambda good: (*good[:2], 1.0, good[3]),
    ],
    ids=["too few", "too many", "none", "over 32 bits", "over 64 bits", "a float"],
)
def test_wrong_values_are_refused_and_nothing_runs(wrong):
    def body(handle, peers, x, out, stream):
        bound = bind(handle, (peers, 7, None, None, None, None), VARYING)
        good = (x.data_ptr(), out.data_ptr(), 64, stream)
        bound(*good)
        out.fill_(-1)
        with pytest.raises(UsageError, match="pass an int for each"):
            bound(*wrong(good))
        targets.active().runtime.synchronize(x.device.index or 0)
        assert bool((out == -1).all())
        bound(*good)
        targets.active().runtime.synchronize(x.device.index or 0)
        assert torch.equal(out, x)

    _alone(body)


@pytest.mark.parametrize(
    ("count", "varying", "said"),
    [
        (6, (0, 2), "argument 0 is passed as c_int"),
        (6, (2, 6), "argument 6 is passed as nothing"),
        (6, (-1,), "argument -1 is passed as nothing"),
        (6, (2, 2), "one twice"),
        (5, (2,), "5 arguments are fewer"),
    ],
)
def test_what_cannot_vary_is_refused(count, varying, said):
    def body(handle, peers, x, out, stream):
        with pytest.raises(UsageError, match=said):
            bind(handle, (peers, 7, x.data_ptr(), out.data_ptr(), 64, stream)[:count], varying)

    _alone(body)


def test_a_specialization_is_compiled():
    def body(handle, peers, x, out, stream):
        bind(specialization("flags", 1, "f32"), (peers, 7, x.data_ptr(), None, 64, stream), (3,))(out.data_ptr())
        targets.active().runtime.synchronize(x.device.index or 0)
        assert torch.equal(out, x)

    _alone(body)


def test_it_keeps_its_kernel_alive():
    def body(handle, peers, x, out, stream):
        spec = specialization("flags", 1, "f32")
        with targets.compile_lock:
            launcher, placeholders = spec.build(spec.world, spec.dtype, spec.blocks, spec.threads)
            own = flyc.compile(launcher, *placeholders)
        alive = weakref.ref(own._keepalive)
        bound = bind(own, (peers, 7, None, None, 64, stream), (2, 3))
        del own, launcher
        gc.collect()
        assert alive() is not None
        bound(x.data_ptr(), out.data_ptr())
        targets.active().runtime.synchronize(x.device.index or 0)
        assert torch.equal(out, x)
        del bound
        gc.collect()
        assert alive() is None, "somebody else keeps it, so this test shows nothing"

    _alone(body)


def test_the_gil_is_released():
    """On the host target a launch runs the kernel, which waits for kernels of other threads."""

    def body(handle, peers, x, out, stream):
        bound = bind(handle, (peers, 7, None, None, 64, stream), (2, 3))
        cells = [cell.cell_contents for cell in bound.__closure__]
        (launch,) = [cell for cell in cells if isinstance(cell, ctypes._CFuncPtr)]
        assert not launch._flags_ & ctypes._FUNCFLAG_PYTHONAPI

    _alone(body)
