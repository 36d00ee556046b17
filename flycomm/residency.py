# SPDX-License-Identifier: Apache-2.0
"""What may wait at the same time must be on the device at the same time (PROTOCOLS rule 12).

A kernel that waits for a peer keeps its place until the peer comes. Were the place not enough for all lanes of all
virtual ranks on a device, one would wait for another that cannot start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flycomm.errors import ResidencyError, TargetError
from flycomm.geometry import EARLY_THREADS, RESIDENT_THREADS, Geometry
from flycomm.tables import Table
from flycomm.targets import Capabilities, Target


@dataclass(frozen=True)
class Residency:
    """The budget of one device: its ``compute_units``; ``lanes`` of each of the ``ranks`` on it, one waiting kernel a
    lane; ``kernel_blocks`` of a rank's kernel channels, counted as one compute unit each."""

    compute_units: int
    lanes: int
    ranks: int
    kernel_blocks: int

    @classmethod
    def of(cls, found: Capabilities, ranks: int, channels: int, kernel_blocks: int) -> Residency:
        """For ``channels`` of each rank; on a target with graphs each has a lane for captured calls too."""
        return cls(found.compute_units, channels * (2 if found.graphs else 1), ranks, kernel_blocks)

    def fits(self, grid: Geometry) -> bool:
        """Whether every lane may wait with this grid."""
        return self._wanted(grid) <= self.compute_units * RESIDENT_THREADS

    def starts_early(self) -> bool:
        """Whether kernels may take their places while the one ahead of them on their lane still runs: one rank on the
        device, and room on every lane for two grids of the largest that do (:mod:`flycomm.primitives.launch_order`)
        where it holds one of any size."""
        return self.ranks == 1 and self.fits(Geometry(2, EARLY_THREADS))

    def check(self, table: Table) -> None:
        """Raise :class:`ResidencyError` with the numbers if not even the smallest grid of the table fits."""
        self._check(min((row.geometry for row in table.rows), key=self._wanted))

    def _check(self, grid: Geometry) -> None:
        if not self.fits(grid):
            raise ResidencyError(
                f"{self.ranks} rank(s) on one device, each with {self.lanes} lane(s) of {grid.blocks} blocks and "
                f"{self.kernel_blocks} blocks of kernel channels, want {self._wanted(grid)} threads to wait at the "
                f"same time, over the {self.compute_units * RESIDENT_THREADS} that the device keeps resident; use "
                "fewer channels, smaller kernel channels, fewer rows in topk= or fewer virtual ranks"
            )

    def check_all(self, grids: Iterable[Geometry]) -> None:
        """Raise :class:`ResidencyError` with the numbers if one of these grids does not fit."""
        for grid in grids:
            self._check(grid)

    def _wanted(self, grid: Geometry) -> int:
        return self.ranks * (self.lanes * grid.blocks * grid.threads + self.kernel_blocks * RESIDENT_THREADS)


def resident_blocks(kernel: Any, target: Target, device: int) -> int | None:
    """How many blocks of a compiled kernel (a launch handle) ``device``, the current one, holds at the same time; None
    on a target that holds any number. Asks the driver, so it is for set-up. :class:`TargetError` if that cannot say."""
    if target.name == "host":
        return None
    try:
        return kernel.max_blocks_per_cu() * target.capabilities(device).compute_units
    except (RuntimeError, ValueError) as error:
        target.raise_pending()
        raise TargetError(str(error)) from error


def check_resident(name: str, blocks: int, ranks: int, resident: int | None) -> None:
    """Raise :class:`ResidencyError` unless the grids of ``blocks`` blocks of all ``ranks`` ranks on one device fit in
    the ``resident`` blocks of this kernel that it holds (None: any number): what :func:`resident_blocks` gives."""
    if resident is not None and ranks * blocks > resident:
        raise ResidencyError(
            f"{name}: {ranks} rank(s) on one device, each with a grid of {blocks} blocks that wait for each other, are "
            f"over the {resident} blocks of it that the device keeps resident; use at most {resident // ranks} blocks"
        )
