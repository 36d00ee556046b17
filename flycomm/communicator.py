# SPDX-License-Identifier: Apache-2.0
"""``Communicator``: what a user holds. Collective to make and to close; all ranks make its calls in one order."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flycomm import __version__, dispatch, tables, targets
from flycomm.channels import Channels
from flycomm.collectives import Collectives
from flycomm.errors import PeerAccessError, UsageError
from flycomm.fused import ExpertRows, Fused, Norm
from flycomm.indexer.selection import TopK
from flycomm.indexer.shard import ShardLayout
from flycomm.kernels._topk_exchange_plan import as_counted, lane_channels
from flycomm.layout import plan_layout
from flycomm.ops import registry
from flycomm.residency import Residency
from flycomm.session import Session
from flycomm.signals import Signals
from flycomm.symmetric import SymmetricTensor
from flycomm.topk import topk_exchange
from flycomm.trace import Trace
from flycomm.validate import check_dtypes, check_options, check_plan, check_tensor, whole
from flycomm.world import World


class Communicator:
    """Collectives over one group of ranks on one target. Made by :func:`flycomm.init`; every rank makes the same calls.

    ``rank``, ``world_size``, ``target`` (name), ``device`` (torch), ``group_name`` (for ``torch.ops.flycomm``),
    ``max_bytes``, ``fp8`` (the 8-bit dtype of this GPU), ``table`` (the agreed dispatch table) are attributes. A call
    raises :class:`UsageError` before anything is launched when it cannot be done, :class:`CommTimeout` when an earlier
    call's wait gave up, :class:`StreamError` when a channel is used from another stream than before. Results are
    reduced in rank order in f32: the same bits on every rank.

    A tensor that is not contiguous or not 16-byte aligned is copied first. Where flycomm cannot do a call,
    ``fallback="group"`` gives it to the group's own backend, "error" raises, and with "none" the result is None.
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
        table: str | None,
        kernel_channels: Mapping[str, tuple[int, int]],
        topk: tuple[int, int],
        debug: bool,
    ):
        options = [__version__, target.name, max_bytes, timeout, fall_back, channels, protocol, table, topk]
        said = json.dumps([*options, str(kernel_channels)], default=repr)  # wrong ones too: all ranks raise alike
        world.agree(said.encode(), "options of flycomm.init")
        check_options(world, max_bytes, timeout, fall_back, channels, protocol, kernel_channels, topk)
        self.rank = world.rank
        self.world_size = world.size
        self.target = target.name
        self.group_name = name
        self.max_bytes = max_bytes
        self._owns_world = owns_world
        self._symmetric: list[SymmetricTensor] = []
        session = self._session = Session(world, target, name, debug)
        self.device = session.device
        capabilities = target.capabilities(world.device)
        rows = self.table = agreed_table(world, capabilities.arch, table)
        kernel_blocks = sum(blocks for blocks, _ in kernel_channels.values())
        residency = Residency.of(capabilities, session.ranks_on_device(), channels, kernel_blocks)
        graphs, fits = capabilities.graphs, None
        if graphs:
            residency.check(rows)
            fits = residency.fits
        if topk[1]:
            session.lane_channels = lane_channels(session.device.type == "cpu", topk[0], topk[1])
            if graphs:
                residency.check_all(as_counted(grid) for grid, _ in session.lane_channels.values())
        layout = plan_layout(
            rows, world.size, max_bytes, channels, graphs, dict(kernel_channels), protocol, fits, session.lane_channels
        )
        self._collectives = Collectives(session, fall_back, max_bytes, layout.routes)
        self._fused = Fused(session, self._collectives, layout.routes, capabilities.arch)
        self.fp8 = self._fused.fp8
        self._signals = Signals(session)
        registry.register(name, self)
        try:
            session.channels = Channels(world, target, layout, round(timeout * capabilities.clock_hz))
        except PeerAccessError as error:
            if fall_back != "group" or session.group() is None:
                registry.unregister(name)
                raise
            session.say_once(f"flycomm uses the group's own backend: {error}")
        except BaseException:
            registry.unregister(name)
            raise
        self._no_more_early = target.start_early(residency.starts_early())

    # ------------------------------------------------------------------ collectives

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, channel: int = 0
    ) -> torch.Tensor:
        """Every rank's ``x`` reduced by ``op``: a new contiguous tensor, or ``out`` (same shape, dtype and device).

        ``x`` is f32, f16 or bf16, of any shape, at most ``max_bytes``. ``op`` is one of ``dtypes.REDUCTIONS``: "avg"
        divides the f32 sum by the number of ranks, "max" and "min" keep a NaN. ``out`` may be ``x``, or must not
        overlap it.
        """
        return self._collectives.all_reduce(x, op, out, channel)

    def all_reduce_(self, x: torch.Tensor, op: str = "sum", channel: int = 0) -> torch.Tensor:
        """:meth:`all_reduce` into ``x`` itself; returns ``x``."""
        return self._collectives.all_reduce(x, op, x, channel)

    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        gemma: bool = False,
        channel: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of every rank's ``x`` (…, hidden), plus ``residual``, normed by rows: ``(normed, residual_out)``.

        With s the sum rounded to the data type, ``residual_out`` is ``s + residual`` in f32, rounded; ``normed`` is
        that f32 times ``1 / sqrt(mean of its squares + eps)`` times ``weight`` (hidden,), of the data type or f32,
        rounded once; ``gemma``: times ``1 + weight``. ``residual`` and ``weight`` are the same on all ranks. One
        kernel where the table has a row for it and ``hidden`` is a whole number of 16 bytes, else one a step; the
        sum's bits are those of :meth:`all_reduce` both ways.
        """
        return self._normed(x, residual, weight, Norm(eps, gemma, "none"), channel)

    def all_reduce_rms_norm_quant(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        quantize: str,
        scale: torch.Tensor | None = None,
        eps: float = 1e-6,
        gemma: bool = False,
        channel: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`all_reduce_rms_norm`, and ``normed`` in 8 bits: ``(codes, scales, residual_out)``.

        ``codes`` (…, hidden) are ``normed / scale`` as the e4m3 type of this GPU, saturated. ``quantize``: "static"
        takes ``scale``, one f32; "token" gives a scale a row (…,), "group" one for 128 elements (…, hidden / 128).
        """
        return self._quantized(x, residual, weight, Norm(eps, gemma, quantize), scale, channel)

    def moe_finalize_all_reduce_rms_norm(
        self,
        expert_out: torch.Tensor,
        topk_weights: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        gemma: bool = False,
        *,
        index: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        channel: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`all_reduce_rms_norm` of every row's weighted sum over its experts: ``(normed, residual_out)``.

        ``topk_weights`` (…, topk), of the data type or f32, topk up to 16. ``expert_out`` (…, topk, hidden); or
        (permuted, hidden), where ``index`` (…, topk), i32, names the row of each expert: a negative one is another
        rank's expert, which adds nothing here, and what is out of range is not checked. ``shared`` (…, hidden): a row
        more, with weight 1, this rank's part of it. The sum is made in f32 in this order and rounded once, so the bits
        are those of :meth:`all_reduce_rms_norm` of that sum. Layout and topk may differ between ranks; ``residual`` and
        ``weight`` do not.
        """
        rows = ExpertRows(expert_out, topk_weights, index, shared)
        return self._normed(rows, residual, weight, Norm(eps, gemma, "none"), channel)

    def moe_finalize_all_reduce_rms_norm_quant(
        self,
        expert_out: torch.Tensor,
        topk_weights: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        quantize: str,
        scale: torch.Tensor | None = None,
        eps: float = 1e-6,
        gemma: bool = False,
        *,
        index: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        channel: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`all_reduce_rms_norm_quant` of what :meth:`moe_finalize_all_reduce_rms_norm` sums."""
        rows = ExpertRows(expert_out, topk_weights, index, shared)
        return self._quantized(rows, residual, weight, Norm(eps, gemma, quantize), scale, channel)

    def _normed(
        self, x: torch.Tensor | ExpertRows, residual: torch.Tensor, weight: torch.Tensor, norm: Norm, channel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual_out, _, _ = self._fused(x, residual, weight, norm, None, channel)
        assert normed is not None
        return normed, residual_out

    def _quantized(
        self,
        x: torch.Tensor | ExpertRows,
        residual: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm,
        scale: torch.Tensor | None,
        channel: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if norm.quantize == "none":
            raise UsageError("quantize='none' has no codes; call the op without _quant")
        _, residual_out, codes, scales = self._fused(x, residual, weight, norm, scale, channel)
        assert codes is not None
        assert scales is not None
        return codes, scales, residual_out

    def reduce_scatter_tensor(
        self, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, channel: int = 0
    ) -> torch.Tensor:
        """This rank's chunk of the reduced ``x``: rows ``rank * n`` to ``(rank + 1) * n`` of its ``world_size * n``.

        Types, ``op`` and bits are those of :meth:`all_reduce`; a chunk is at most ``max_bytes``. ``out`` may be this
        rank's own chunk of ``x``, or must not overlap it.
        """
        return self._collectives.reduce_scatter(x, op, out, channel)

    def all_gather_into_tensor(
        self, x: torch.Tensor, out: torch.Tensor | None = None, dim: int = 0, channel: int = 0
    ) -> torch.Tensor:
        """Every rank's ``x``, of any dtype, side by side in the first dimension (``dim=0``) or the last (``dim=-1``).

        ``x`` is at most ``max_bytes``. ``out`` must not overlap ``x``, unless ``dim`` is 0 and ``x`` is this rank's
        part of it.
        """
        return self._collectives.all_gather(x, dim, out, channel)

    def topk_exchange(
        self,
        scores: torch.Tensor,
        lengths: torch.Tensor | None,
        k: int,
        *,
        layout: ShardLayout | None = None,
        mode: str = "all",
        order: str = "score",
        tie_break: str = "low",
        ids: torch.Tensor | None = None,
        owners: torch.Tensor | None = None,
        forced: tuple[int, int] = (0, 0),
        local_lengths: bool = False,
        algo: str = "auto",
        channel: int = 0,
    ) -> TopK:
        """The ``k`` best of each row over all ranks' ``scores`` (rows, columns): ``(scores, ids, counts)``.

        One launch, the same bits every time; :func:`flycomm.topk.topk_exchange` says what the arguments mean. Its
        channels are made by ``init(topk=(rows, k))``; more rows than that take longer, by ``algo="radix"``.
        """
        return topk_exchange(
            self._session,
            scores,
            k,
            lengths,
            layout=layout,
            mode=mode,
            order=order,
            tie_break=tie_break,
            ids=ids,
            owners=owners,
            forced=forced,
            local_lengths=local_lengths,
            algo=algo,
            channel=channel,
        )

    def barrier(self, channel: int = 0) -> None:
        """On the current stream: nothing after it runs before every rank's stream has come this far."""
        self._collectives.barrier(channel)

    def should_use(self, x: torch.Tensor, op: str = "sum") -> bool:
        """Whether :meth:`all_reduce` of ``x`` would run flycomm's kernel; the same on all ranks."""
        check_tensor("the input", x)
        return self.plan("all_reduce", x.dtype, x.numel() * x.element_size(), op).protocol != "fallback"

    def plan(
        self, op: str, dtype: torch.dtype, num_bytes: int, reduction: str = "sum", captured: bool | None = None
    ) -> dispatch.Plan:
        """The protocol and the grid of a call of ``op`` (one of ``tables.OPS``); the same on all ranks.

        ``num_bytes``: of the message of an all-reduce, of a rank's shard otherwise. ``captured``: in a graph, or not
        (default: whether a capture is going on).
        """
        self._session.check_open()
        check_plan(op, dtype, num_bytes)
        if captured is None:
            captured = self._session.is_capturing()
        return self._collectives.plan(op, reduction, dtype, num_bytes, captured)

    def plan_rms_norm(self, dtype: torch.dtype, rows: int, hidden: int, captured: bool | None = None) -> dispatch.Plan:
        """As :meth:`plan`, for the calls that end in a norm of ``rows`` rows; the same on all ranks.

        Its ``row`` is that of the one kernel; where that is None, ``protocol`` is "separate" for an all-reduce and a
        kernel a step, or "fallback".
        """
        self._session.check_open()
        check_dtypes(dtype)
        if not whole(rows, hidden) or min(rows, hidden) < 0:
            raise UsageError(f"{rows!r} rows of {hidden!r} elements cannot be; pass whole numbers of at least 0")
        if captured is None:
            captured = self._session.is_capturing()
        return self._fused.plan(dtype, rows, hidden, captured)

    def prepare(self, dtypes: Sequence[torch.dtype] = (), num_bytes: Sequence[int] = ()) -> None:
        """Compile, ahead of the first call, what these dtypes and bytes of a rank need (default: everything).

        Sums, and gathers of whole 16-byte units; others compile at their first call. Collective: all ranks have
        everything loaded when it returns. In a world of virtual ranks on one GPU loading a module can wait for a
        running kernel, so call it before the first collective.
        """
        self._session.enter()
        if not isinstance(dtypes, Sequence) or not isinstance(num_bytes, Sequence) or not whole(*num_bytes):
            raise UsageError(
                f"dtypes={dtypes!r} and num_bytes={num_bytes!r} are not sequences of dtypes and of whole numbers; pass "
                "for example [torch.bfloat16], [8192]"
            )
        check_dtypes(*dtypes)
        for specialization in self._collectives.needed(dtypes, num_bytes):
            self._session.load(specialization)
        self._session.world.barrier()

    # ------------------------------------------------------------------ signals and memory

    def put_signal(self, dst_rank: int, channel: int = 0) -> None:
        """On the current stream: signal ``dst_rank`` once, after everything this stream wrote before, peers' too."""
        self._signals.put(dst_rank, channel)

    def wait_signal(self, src_rank: int, channel: int = 0) -> None:
        """On the current stream: wait for one more signal of ``src_rank`` on ``channel`` than waited for before."""
        self._signals.wait(src_rank, channel)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """Rank ``rank``'s part of the symmetric buffer as a tensor: ``sizes`` elements from ``storage_offset`` on.

        The ranks' parts are ``max_bytes // 8`` bytes each and are the caller's to order, with :meth:`put_signal`,
        :meth:`wait_signal` or :meth:`barrier`. The tensor must not be used after :meth:`close`.
        """
        return self._signals.buffer(rank, sizes, dtype, storage_offset)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """Collective: a tensor of symmetric memory, with collectives that read the peers' in place.

        Not counted in ``max_bytes``. Never in a capture, nor while a kernel of this communicator may wait: it
        allocates. It lives until its ``close()`` or the communicator's.
        """
        made = SymmetricTensor(self._session, self._collectives, shape, dtype)
        self._symmetric.append(made)
        return made

    # ------------------------------------------------------------------ for kernels of the user's own

    def peers(self, name: str) -> Any:
        """The ``Peers`` argument of the kernel channel ``name``, declared in ``init(kernel_channels={name: …})``.

        One kernel, or several with the same grid and slots, use it, in one order on all ranks and on one stream.
        """
        channels = self._session.require_channels()
        found = {key.wire[7:]: peers for key, peers in channels.peers.items() if key.wire.startswith("kernel:")}
        if name not in found:
            raise UsageError(
                f"no kernel channel is named {name!r} (there are: {', '.join(sorted(found)) or 'none'}); pass "
                "kernel_channels={name: (blocks, bytes)} to init"
            )
        return found[name]

    def stream(self) -> int:
        """The raw handle of torch's current stream on this communicator's device, for a launch of the user's own."""
        return self._session.stream()

    # ------------------------------------------------------------------ to look at

    def trace(self, path: str | os.PathLike[str], records: int = 1024) -> Trace:
        """Record what every block does, and write it to ``path`` in the format that Perfetto reads::

            with comm.trace("step.json"):
                y = comm.all_reduce(x)

        Or ``start()`` and ``stop()`` of what is returned. Collective, and never in a capture. Kernels that are launched
        meanwhile are compiled anew, to record the posts, takes, waits and stages of each block; those of a mono layer
        only if it was made meanwhile, those of a graph only if it was captured meanwhile. Outside of traces no kernel
        has anything of this in it. ``records``: kept of each block of each channel, 32 bytes each; what comes after
        them is dropped and counted. Rank 0 writes the file; the clocks of several GPUs are compared by barriers, and
        the file says how exactly.
        """
        return Trace(self._session, self._collectives, path, records)

    # ------------------------------------------------------------------ life

    def check(self) -> None:
        """Raise :class:`CommTimeout` if a wait of an earlier call gave up. Reads host memory: no synchronisation."""
        self._session.enter()

    def recover(self) -> None:
        """Collective: after a :class:`CommTimeout`, make every channel usable again, and what mono layers know of their
        channels. Results in flight are lost."""
        session = self._session
        session.check_open()
        session.synchronize()
        session.world.barrier()
        if session.channels is not None:
            session.channels.reset()
            for layer in session.layers:
                layer.reset()
            session.synchronize()
            if session.trace is not None:
                session.trace.arm()
        session.failure = None
        session.world.barrier()

    def use_stream(self, stream: Any, channel: int = 0) -> None:
        """Hand a channel over to another torch stream: its work waits for what the old stream has queued."""
        session = self._session
        session.check_open()
        session.target.runtime.order(session.streams.get(channel), stream, session.world.device)
        session.streams[channel] = session.target.runtime.handle(stream)

    def close(self) -> None:
        """Collective: wait for this rank's kernels, then for all ranks, then unmap and free. Safe to call again."""
        session = self._session
        if session.closed:
            return
        session.closed = True
        registry.unregister(self.group_name)
        session.synchronize()
        self._no_more_early()
        if session.trace is not None:
            session.trace.drop()
        for one in self._symmetric:
            one.close()
        if session.channels is not None:
            session.channels.close()
            session.channels = None
        if self._owns_world:
            session.world.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Without the others: give the name back, and let nobody wait for this rank. The memory is kept, and what it
        says of early starts: its kernels may still be there."""
        if self._session.closed:
            return
        self._session.closed = True
        registry.unregister(self.group_name)
        if self._session.channels is not None:
            self._session.channels.abort()

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None and not session.closed:
            warnings.warn(f"communicator {self.group_name!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"Communicator({self.group_name!r}, rank {self.rank} of {self.world_size}, target {self.target})"


def agreed_table(world: World, arch: str, asked: str | None) -> tables.Table:
    """The table that rank 0 reads, by ``tables.load(arch, asked)``, on all ranks. Collective.

    What is wrong with it, or a chip that is another, all ranks raise. What ``asked`` is on other ranks does not matter.
    """
    world.agree(arch.encode(), "GPU architecture")
    text, problem = "", ""
    if world.rank == 0:
        try:
            text = tables.load(arch, asked).to_json()
        except UsageError as error:
            problem = str(error)
    if reasons := world.vote(not problem, problem):
        raise UsageError("; ".join(reasons))
    table = tables.parse(world.exchange(text.encode())[0].decode(), "rank 0's dispatch table")
    world.agree(table.digest(), "dispatch table")
    return table
