# SPDX-License-Identifier: Apache-2.0
"""``Communicator``: what a user holds. Collective to make and to close; all ranks make its calls in one order."""

from __future__ import annotations

import json
import logging
import math
import warnings
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from flycomm import __version__, dispatch, fallback, kernels, targets
from flycomm.channel import USER_CHANNELS
from flycomm.channels import Channels
from flycomm.dtypes import REDUCIBLE
from flycomm.errors import (
    ClosedError,
    CommTimeout,
    DisagreementError,
    PeerAccessError,
    ResidencyError,
    StreamError,
    UsageError,
)
from flycomm.geometry import PROTOCOLS, geometry, size_class
from flycomm.layout import Key, plan_layout
from flycomm.ops import registry
from flycomm.residency import Residency
from flycomm.validate import check_options, check_out, usable
from flycomm.views import tensor_at
from flycomm.world import World

logger = logging.getLogger("flycomm")

_NAMES = {getattr(torch, entry.torch_name): entry.name for entry in REDUCIBLE.values()}


class Communicator:
    """Collectives over one group of ranks on one target. Made by :func:`flycomm.init`; every rank makes the same calls.

    ``rank``, ``world_size``, ``target`` (name), ``device`` (torch), ``group_name`` (for ``torch.ops.flycomm``),
    ``max_bytes`` are attributes. A call raises :class:`UsageError` before anything is launched when it cannot be done,
    :class:`CommTimeout` when an earlier call's wait gave up, :class:`StreamError` when a channel is used from another
    stream than before. Results are sums in rank order in f32: the same bits on every rank.
    """

    def __init__(
        self,
        world: World,
        target: targets.Target,
        *,
        owns_world: bool,
        name: str,
        max_bytes: int,
        timeout: float,
        fall_back: str,
        channels: int,
        protocol: str,
        kernel_channels: dict[str, tuple[int, int]],
        debug: bool,
    ):
        check_options(world, max_bytes, timeout, fall_back, channels, protocol, kernel_channels)
        self.rank = world.rank
        self.world_size = world.size
        self.target = target.name
        self.group_name = name
        self.max_bytes = max_bytes
        self._world = world
        self._owns_world = owns_world
        self._target = target
        self._fall_back_to = fall_back
        self._debug = debug
        self._protocol = protocol
        self._closed = False
        self._failure: CommTimeout | None = None
        self._streams: dict[int, int] = {}
        self._said: set[str] = set()
        self._channels: Channels | None = None
        self._largest = 0
        capabilities = target.capabilities(world.device)
        device_type = target.runtime.torch_device_type
        self.device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, world.device)
        options = [__version__, target.name, max_bytes, timeout, fall_back, channels, protocol, kernel_channels]
        world.agree(json.dumps(options).encode(), "options of flycomm.init")
        world.agree(dispatch.table_hash(target.name), "dispatch table")
        kernel_blocks = sum(blocks for blocks, _ in kernel_channels.values())
        residency = Residency.of(capabilities, self._ranks_on_device(), channels, kernel_blocks)
        graphs, fits = capabilities.graphs, None
        if graphs:
            residency.check(target.name)
            fits = residency.fits
        layout = plan_layout(target.name, world.size, max_bytes, channels, graphs, kernel_channels, protocol, fits)
        registry.register(name, self)
        try:
            self._channels = Channels(world, target, layout, round(timeout * capabilities.clock_hz))
            self._largest = layout.largest_class
        except PeerAccessError as error:
            if fall_back != "group" or self._group() is None:
                registry.unregister(name)
                raise
            self._say_once(f"flycomm uses the group's own backend: {error}")
        except BaseException:
            registry.unregister(name)
            raise

    # ------------------------------------------------------------------ collectives

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, channel: int = 0
    ) -> torch.Tensor:
        """The sum of every rank's ``x``: a new contiguous tensor, or ``out`` (same shape, dtype and device).

        ``x`` is f32, f16 or bf16, of any shape, stride and alignment (one that is not contiguous or not 16-byte
        aligned is copied first), at most ``max_bytes``. ``out`` may be ``x``, or must not overlap it. With
        ``fallback="group"`` anything else goes to the group's own backend; with ``"none"`` the result is None.
        """
        plan = self._plan("all_reduce", op, x)
        if out is not None:
            check_out(x, out)
        if plan.protocol == "fallback":
            return self._fall_back(plan, x, op, out)
        source = x if usable(x) else x.clone(memory_format=torch.contiguous_format)
        result = out if out is not None and usable(out) else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            self._launch_all_reduce(plan, source, result, channel)
        if out is not None and result is not out:
            out.copy_(result)
            return out
        return result

    def all_reduce_(self, x: torch.Tensor, op: str = "sum", channel: int = 0) -> torch.Tensor:
        """:meth:`all_reduce` into ``x`` itself; returns ``x``."""
        return self.all_reduce(x, op, out=x, channel=channel)

    def barrier(self, channel: int = 0) -> None:
        """On the current stream: nothing after it runs before every rank's stream has come this far."""
        self._enter()
        self._roll_call("barrier", "", (), "")
        if self._channels is None:
            fallback.barrier(self._group())
            return
        key = self._key(channel, "barrier", 0)
        handle = self._compiled(kernels.rank_barrier(self.world_size))
        peers = self._channels.peers[key]
        handle(peers, _tag("barrier", "", 0, channel), peers.state.value, self._stream())
        self._target.raise_pending()

    def should_use(self, x: torch.Tensor, op: str = "sum") -> bool:
        """Whether :meth:`all_reduce` of ``x`` would run flycomm's kernel in one launch; the same on all ranks."""
        plan = dispatch.select("all_reduce", op, self.target, self.world_size, *self._size_and_limits(x))
        return self._channels is not None and plan.protocol != "fallback" and plan.pieces <= 1

    def prepare(self, dtypes: Sequence[torch.dtype] = (), num_bytes: Sequence[int] = ()) -> None:
        """Compile, ahead of the first call, what these dtypes and message sizes need (default: everything).

        Collective: all ranks have everything loaded when it returns. In a world of virtual ranks on one GPU loading a
        module can wait for a running kernel, so call it before the first collective.
        """
        self._enter()
        for specialization in self._needed(dtypes, num_bytes):
            self._compiled(specialization)
        self._world.barrier()

    # ------------------------------------------------------------------ signals and buffers

    def put_signal(self, dst_rank: int, channel: int = 0) -> None:
        """On the current stream: signal ``dst_rank`` once, after everything this stream wrote before, peers' too."""
        self._signal("put", dst_rank, channel)

    def wait_signal(self, src_rank: int, channel: int = 0) -> None:
        """On the current stream: wait for one more signal of ``src_rank`` on ``channel`` than waited for before."""
        self._signal("wait", src_rank, channel)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """Rank ``rank``'s part of the symmetric buffer as a tensor: ``sizes`` elements from ``storage_offset`` on.

        The ranks' parts are ``max_bytes // 8`` bytes each and are the caller's to order, with :meth:`put_signal`,
        :meth:`wait_signal` or :meth:`barrier`. The tensor must not be used after :meth:`close`.
        """
        channels = self._require_channels()
        self._check_rank(rank)
        item = torch.empty((), dtype=dtype).element_size()
        start, length = storage_offset * item, math.prod(sizes) * item
        if start < 0 or start + length > channels.layout.user_bytes:
            raise UsageError(
                f"bytes {start}..{start + length} are outside the buffer of {channels.layout.user_bytes} bytes; "
                "pass a larger max_bytes to init"
            )
        address = channels.user_address(rank) + start
        return tensor_at(address, length, self.device).view(dtype).view(tuple(sizes))

    # ------------------------------------------------------------------ for kernels of the user's own

    def peers(self, name: str) -> Any:
        """The ``Peers`` argument of the kernel channel ``name``, declared in ``init(kernel_channels={name: …})``.

        One kernel, or several with the same grid and slots, use it, in one order on all ranks and on one stream.
        """
        channels = self._require_channels()
        found = [peers for key, peers in channels.peers.items() if key.protocol == f"kernel:{name}"]
        if not found:
            known = sorted(key.protocol[7:] for key in channels.peers if key.protocol.startswith("kernel:"))
            raise UsageError(
                f"no kernel channel is named {name!r} (there are: {', '.join(known) or 'none'}); pass "
                "kernel_channels={name: (blocks, bytes)} to init"
            )
        return found[0]

    def stream(self) -> int:
        """The raw handle of torch's current stream on this communicator's device, for a launch of the user's own."""
        return self._stream()

    # ------------------------------------------------------------------ life

    def check(self) -> None:
        """Raise :class:`CommTimeout` if a wait of an earlier call gave up. Reads host memory: no synchronisation."""
        self._enter()

    def recover(self) -> None:
        """Collective: after a :class:`CommTimeout`, make every channel usable again. Results in flight are lost."""
        self._check_open()
        self._synchronize()
        self._world.barrier()
        if self._channels is not None:
            self._channels.reset()
        self._failure = None
        self._world.barrier()

    def use_stream(self, stream: Any, channel: int = 0) -> None:
        """Hand a channel over to another torch stream: its work waits for what the old stream has queued."""
        self._check_open()
        previous = self._streams.get(channel)
        self._target.runtime.order(previous, stream, self._world.device)
        self._streams[channel] = self._target.runtime.handle(stream)

    def close(self) -> None:
        """Collective: wait for this rank's kernels, then for all ranks, then unmap and free. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        registry.unregister(self.group_name)
        self._synchronize()
        if self._channels is not None:
            self._channels.close()
            self._channels = None
        if self._owns_world:
            self._world.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Without the others: give the name back, and let nobody wait for this rank. The memory is kept."""
        if self._closed:
            return
        self._closed = True
        registry.unregister(self.group_name)
        if self._channels is not None:
            self._channels.abort()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"communicator {self.group_name!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"Communicator({self.group_name!r}, rank {self.rank} of {self.world_size}, target {self.target})"

    # ------------------------------------------------------------------ inside

    def _enter(self) -> None:
        self._check_open()
        if self._failure is None and self._channels is not None and self._channels.failed():
            record = self._channels.failure()
            self._failure = CommTimeout(f"{record}; call recover() on all ranks, or close", record)
        if self._failure is not None:
            raise CommTimeout(str(self._failure), self._failure.record)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"communicator {self.group_name!r} is closed; make another with flycomm.init")

    def _require_channels(self) -> Channels:
        self._enter()
        if self._channels is None:
            raise UsageError("ranks cannot map each other's memory here, so there are no signals or buffers")
        return self._channels

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} is not in 0..{self.world_size - 1}; pass a rank of this group")

    def _size_and_limits(self, x: torch.Tensor) -> tuple[int, str, int, int, str]:
        dtype = str(x.dtype).removeprefix("torch.")
        return x.numel() * x.element_size(), dtype, self.max_bytes, self._largest or self.max_bytes, self._protocol

    def _plan(self, op: str, reduction: str, x: torch.Tensor) -> dispatch.Plan:
        self._enter()
        if x.device != self.device:
            raise UsageError(f"the tensor is on {x.device}, this communicator on {self.device}; move the tensor")
        self._roll_call(op, reduction, tuple(x.shape), str(x.dtype))
        if self._channels is None:
            return dispatch.Plan("fallback", reason="ranks cannot map each other's memory")
        return dispatch.select(op, reduction, self.target, self.world_size, *self._size_and_limits(x))

    def _roll_call(self, op: str, reduction: str, shape: tuple[int, ...], dtype: str) -> None:
        """In debug mode, compare what every rank is about to do, before a channel is touched."""
        if not self._debug:
            return
        said = self._world.exchange(json.dumps([op, reduction, shape, dtype]).encode())
        for rank, other in enumerate(said):
            if other != said[self.rank]:
                raise DisagreementError(
                    f"rank {self.rank} calls {said[self.rank].decode()}, rank {rank} calls {other.decode()}: all ranks "
                    "must make the same call"
                )

    def _key(self, number: int, protocol: str, class_bytes: int) -> Key:
        captured = self._target.runtime.is_capturing(self._world.device)
        key = Key(number, captured, protocol, class_bytes)
        assert self._channels is not None
        if key not in self._channels.peers:
            count = 1 + max(slot.key.number for slot in self._channels.layout.slots)
            raise UsageError(f"channel {number} is not in 0..{count - 1}; pass a larger channels= to init")
        if not captured:
            stream = self._stream()
            if self._streams.setdefault(number, stream) != stream:
                raise StreamError(
                    f"channel {number} belongs to stream {self._streams[number]:#x}, this is stream {stream:#x}; hand "
                    "it over with use_stream(), or use another channel"
                )
        return key

    def _stream(self) -> int:
        return self._target.runtime.current_stream(self._world.device)

    def _launch_all_reduce(self, plan: dispatch.Plan, source: torch.Tensor, out: torch.Tensor, channel: int) -> None:
        key = self._key(channel, plan.protocol, plan.class_bytes)
        assert self._channels is not None
        peers = self._channels.peers[key]
        dtype = _NAMES[source.dtype]
        grid = geometry(self.target, plan.class_bytes)
        handle = self._compiled(kernels.all_reduce(self.world_size, dtype, grid, plan.protocol))
        count, item = source.numel(), source.element_size()
        tag = _tag("all_reduce", dtype, count, channel)
        stream, start, destination = self._stream(), source.data_ptr(), out.data_ptr()
        step = plan.class_bytes // item
        for first in range(0, count, step):
            offset = first * item
            handle(peers, tag, start + offset, destination + offset, min(step, count - first), stream)
        self._target.raise_pending()

    def _signal(self, verb: str, peer: int, channel: int) -> None:
        channels = self._require_channels()
        self._check_rank(peer)
        if not 0 <= channel < USER_CHANNELS:
            raise UsageError(f"signal channel {channel} is not in 0..{USER_CHANNELS - 1}; use one of these")
        if peer == self.rank:
            raise UsageError(f"rank {peer} cannot signal itself; order work on one rank with streams and events")
        key = Key(0, False, "signals")
        build = kernels.put_signal if verb == "put" else kernels.wait_signal
        handle = self._compiled(build(self.world_size))
        handle(channels.peers[key], channel, peer, channels.segment(key, peer), self._stream())
        self._target.raise_pending()

    def _needed(self, dtypes: Sequence[torch.dtype], num_bytes: Sequence[int]) -> list[kernels.Specialization]:
        if self._channels is None:
            return []
        wanted = {min(size_class(size), self._largest) for size in num_bytes}
        choices = dict.fromkeys(  # in the layout's order, which is the same on all ranks
            (geometry(self.target, slot.key.class_bytes), slot.key.protocol)
            for slot in self._channels.layout.slots
            if slot.key.protocol in PROTOCOLS and (not wanted or slot.key.class_bytes in wanted)
        )
        world = self.world_size
        reductions = [
            kernels.all_reduce(world, _NAMES[dtype], grid, protocol)
            for dtype in (dtypes or tuple(_NAMES))
            for grid, protocol in choices
        ]
        return [kernels.rank_barrier(world), kernels.put_signal(world), kernels.wait_signal(world), *reductions]

    def _compiled(self, specialization: kernels.Specialization) -> Any:
        if self._world.local and self._target.runtime.torch_device_type != "cpu":
            self._prepare_together(specialization)
        return kernels.compiled(specialization)

    def _prepare_together(self, specialization: kernels.Specialization) -> None:
        """Virtual ranks share a GPU: nobody may launch and wait while another still loads the module."""
        if specialization.name not in self._said:
            self._target.preload(kernels.compiled(specialization), self._world.device)
            self._said.add(specialization.name)
            self._world.barrier()

    def _fall_back(self, plan: dispatch.Plan, x: torch.Tensor, op: str, out: torch.Tensor | None) -> Any:
        if self._fall_back_to == "none":
            return None
        if self._fall_back_to == "error" or self._group() is None:
            raise UsageError(f"all_reduce: {plan.reason}")
        self._say_once(f"flycomm falls back to the group's own backend: {plan.reason}")
        return fallback.all_reduce(self._group(), x, op, out)

    def _group(self) -> Any:
        """The torch.distributed group, or None. The world holds it weakly: who destroys it may do so before us."""
        return getattr(self._world, "group", None)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)

    def _synchronize(self) -> None:
        self._target.runtime.synchronize(self._world.device)

    def _ranks_on_device(self) -> int:
        """How many virtual ranks of this process share this rank's device. They need a stream each."""
        if not self._world.local:
            return 1
        device, stream = self._world.device, self._stream()
        places = [tuple(json.loads(place)) for place in self._world.exchange(json.dumps([device, stream]).encode())]
        ranks = sum(other == device for other, _ in places)
        queues = self._target.runtime.hardware_queues()
        if queues and len(set(places)) < len(places):
            raise StreamError(
                f"virtual ranks share a stream (device, stream: {places}), so one would wait for ever for another; "
                "start them with World.local(n).run, or make a stream current in each rank's thread"
            )
        if queues and ranks > queues:
            raise ResidencyError(
                f"{ranks} virtual ranks on one device are over its {queues} hardware queues; set "
                "CUDA_DEVICE_MAX_CONNECTIONS (or GPU_MAX_HW_QUEUES) before the first use of the GPU"
            )
        return ranks


@lru_cache(maxsize=4096)
def _tag(op: str, dtype: str, count: int, channel: int) -> int:
    """31 bits that peers compare: what a call must have alike on all ranks."""
    return zlib.crc32(f"{op} {dtype} {count} {channel}".encode()) & 0x7FFFFFFF
