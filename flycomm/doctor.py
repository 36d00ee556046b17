# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm doctor``: what flycomm finds on this machine, and what is missing for each target."""

from __future__ import annotations

import inspect
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flycomm import __version__, _console, env, targets
from flycomm.errors import CommError, UsageError
from flycomm.targets import _rocm_toolkit

_WORLDS = (2, 4, 8)  # of the channel budget
_MPI_LAUNCHERS = ("mpirun", "mpiexec")
# What a damaged installation may raise where a section looks; the section then says so and the others go on.
_FAULTS = (CommError, OSError, RuntimeError, ImportError, AttributeError, ValueError)


def main(as_json: bool) -> int:
    """Print the report; 0 if at least one target can run kernels here, else 1."""
    report = collect()
    if as_json:
        _console.write(json.dumps(report, indent=1))
    else:
        show(report)
    return 0 if any(target["ok"] for target in report["targets"]) else 1


def collect() -> dict[str, Any]:
    """The whole report as plain data. Opens the drivers; never raises for what is missing or broken."""
    found = [_target(name) for name in targets.NAMES]
    return {
        "versions": _guarded(_versions),
        "targets": found,
        "peer_access": _guarded(lambda: _peer_access(found)),
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
        "numpy": _package("numpy"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


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


def show(report: dict[str, Any]) -> None:
    """Write the report as tables."""
    _pairs("Versions", report["versions"])
    _console.table(
        "Targets",
        ("target", "usable", "why"),
        [(one["name"], _yes(one["ok"]), one["reason"]) for one in report["targets"]],
    )
    devices = [(one["name"], device) for one in report["targets"] for device in one["devices"]]
    if devices:
        _console.table(
            "Devices",
            ("target", "device", "name", "arch", "warp", "units", "memory", "clock", "graphs"),
            [_device_row(target, device) for target, device in devices],
        )
    _show_peers(report["peer_access"])
    _pairs("Shared memory", report["shared_memory"])
    _pairs("Memory sharing between processes", report["memory_sharing"])
    _pairs("Linker for AMD code objects", report["amd_linker"])
    _pairs("MPI", report["mpi"])
    _console.table(
        "Environment",
        ("variable", "value", "set", "meaning"),
        [
            (one["name"], str(one.get("error", one["value"])), _yes(one["set"]), one["meaning"])
            for one in report["environment"]
        ],
    )
    _records("Channels of a communicator with init's defaults", report["channels"])


def _device_row(target: str, device: dict[str, Any]) -> tuple[str, ...]:
    return (
        target,
        str(device["device"]),
        device["device_name"],
        device["arch"],
        str(device["warp_size"]),
        str(device["compute_units"]),
        _bytes(device["memory_bytes"]),
        f"{device['clock_hz'] / 1e6:g} MHz",
        _yes(device["graphs"]),
    )


def _show_peers(matrix: Any) -> None:
    if isinstance(matrix, dict):
        _pairs("Peer access", matrix)
    elif matrix:
        columns = ("device", *map(str, range(len(matrix))))
        _console.table("Peer access", columns, [(str(a), *map(_yes, row)) for a, row in enumerate(matrix)])


def _pairs(title: str, found: dict[str, Any]) -> None:
    _console.table(title, ("what", "found"), [(key, _text(key, value)) for key, value in found.items()])


def _records(title: str, found: Any) -> None:
    if isinstance(found, dict):
        _pairs(title, found)
    elif found:
        _console.table(
            title,
            [key.removesuffix("_bytes") for key in found[0]],
            [[_text(key, value) for key, value in one.items()] for one in found],
        )


def _text(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return " ".join(value)
    return _bytes(value) if key.endswith("_bytes") else str(value)


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
