# SPDX-License-Identifier: Apache-2.0
"""The report of :mod:`flycomm.doctor.sections` as tables."""

from __future__ import annotations

from typing import Any

from flycomm import _console


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
    _show_topology(report["topology"])
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


def _show_topology(found: Any) -> None:
    if isinstance(found, dict):
        _pairs("Topology", found)
        return
    for one in found:
        _pairs("Topology", {one["command"]: one["problem"] or f"{len(one['output'].splitlines())} lines, in --json"})
        if links := one["links"]:
            rows = [(name, *row) for name, row in zip(links["names"], links["kinds"], strict=True)]
            _console.table(f"Links, by {one['command']}", ("GPU", *links["names"]), rows)


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
