# SPDX-License-Identifier: Apache-2.0
"""What flycomm finds on this machine, as plain data: a section each, none of which stops the others."""

from __future__ import annotations

import inspect
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flycomm import __version__, env, targets
from flycomm.doctor.topology import topology
from flycomm.errors import CommError, UsageError
from flycomm.targets import _rocm_toolkit

_WORLDS = (2, 4, 8)  # of the channel budget
_MPI_LAUNCHERS = ("mpirun", "mpiexec")
# What a damaged installation may raise where a section looks; the section then says so and the others go on.
_FAULTS = (CommError, OSError, RuntimeError, ImportError, AttributeError, ValueError)


def collect() -> dict[str, Any]:
    """The whole report as plain data. Opens the drivers; never raises for what is missing or broken."""
    found = [_target(name) for name in targets.NAMES]
    return {
        "versions": _guarded(_versions),
        "targets": found,
        "peer_access": _guarded(lambda: _peer_access(found)),
        "topology": _guarded(topology),
        "shared_memory": _guarded(_shared_memory),
        "memory_sharing": _guarded(lambda: _memory_sharing(found)),
        "amd_linker": _guarded(_amd_linker),
        "mpi": _guarded(_mpi),
        "environment": [_variable(variable) for variable in env.ALL],
        "channels": _guarded(lambda: _channels(found)),
    }


def _guarded(section: Callable[[], Any]) -> Any:
    try:
        return section()
    except _FAULTS as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    return {
        "flycomm": __version__,
        "flydsl": _package("flydsl"),
        "torch": _package("torch"),
        "torch_built_for": _torch_built_for(),
        "numpy": _package("numpy"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "rocm": _first_line("/opt/rocm/.info/version"),
        "amdgpu_driver": _first_line("/sys/module/amdgpu/version"),
        "nvidia_driver": _first_line("/proc/driver/nvidia/version"),
    }


def _torch_built_for() -> str:
    try:
        from torch import version as built
    except (ImportError, OSError) as error:
        return str(error)
    found = (("ROCm", built.hip), ("CUDA", built.cuda))
    return next((f"{name} {number}" for name, number in found if number), "CPU")


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return None


def _target(name: str) -> dict[str, Any]:
    try:
        target = targets.get(name)
        found = target.availability()
        devices = [
            {"device": device, **asdict(target.capabilities(device))}
            for device in range(target.runtime.device_count() if found.ok else 0)
        ]
    except _FAULTS as error:
        return {"name": name, "ok": False, "reason": f"{type(error).__name__}: {error}", "devices": []}
    return {"name": name, "ok": found.ok, "reason": found.reason, "devices": devices}


def _peer_access(found: list[dict[str, Any]]) -> list[list[bool]] | None:
    """Row: the device that reads and writes; column: whose memory. None without a GPU target."""
    if not any(target["ok"] and target["name"] != "host" for target in found):
        return None
    import torch

    devices = range(torch.cuda.device_count())
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in devices] for a in devices]


def _shared_memory() -> dict[str, Any]:
    usage = shutil.disk_usage("/dev/shm")
    return {"path": "/dev/shm", "total_bytes": usage.total, "free_bytes": usage.free}


def _memory_sharing(found: list[dict[str, Any]]) -> dict[str, str]:
    """How each usable target's ranks reach each other's memory."""
    return {one["name"]: targets.get(one["name"]).memory.sharing(0) for one in found if one["ok"]}


def _amd_linker() -> dict[str, Any]:
    linker = _rocm_toolkit.find_linker()
    return {"command": list(linker.command), "version": linker.version}


def _mpi() -> dict[str, Any]:
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    launchers = (shutil.which(name, path=folders) for name in _MPI_LAUNCHERS)
    return {
        "mpi4py": _package("mpi4py"),
        "openmpi": _package("openmpi"),
        "launcher": next(filter(None, launchers), None),
    }


def _variable(variable: env.Variable[Any]) -> dict[str, Any]:
    entry = {"name": variable.name, "set": bool(os.environ.get(variable.name)), "meaning": variable.meaning}
    try:
        return entry | {"value": variable.get()}
    except UsageError as error:
        return entry | {"value": None, "error": str(error)}


def _channels(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Peer-mapped bytes of a communicator made with ``init``'s defaults, on the target that ``init`` would pick."""
    from flycomm import tables
    from flycomm.layout import plan_layout
    from flycomm.start import DEFAULT_MAX_BYTES, init

    asked = env.TARGET.get()
    usable = [target for target in found if target["ok"] and asked in ("", target["name"])]
    if not usable:
        return []
    channels = inspect.signature(init).parameters["channels"].default
    devices = usable[0]["devices"]
    graphs = any(device["graphs"] for device in devices)
    table = tables.load(devices[0]["arch"])
    budget = []
    for world in _WORLDS:
        layout = plan_layout(table, world, DEFAULT_MAX_BYTES, channels, graphs)
        budget.append(
            {
                "target": usable[0]["name"],
                "world": world,
                "max_bytes": DEFAULT_MAX_BYTES,
                "channels": len(layout.slots),
                "table": f"{table.arch}, {table.source}",
                "channel_bytes": layout.num_bytes - layout.user_bytes,
                "user_bytes": layout.user_bytes,
                "state_bytes": layout.state_bytes,
            }
        )
    return budget
