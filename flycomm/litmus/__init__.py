# SPDX-License-Identifier: Apache-2.0
"""``python -m flycomm litmus``: in which order ranks see each other's stores, on this machine.

``verdict`` says which outcome is forbidden in which order; ``run`` plays rounds and counts; ``cli`` prints. The kernel
is :mod:`flycomm.kernels.litmus`, the reasons are in ``docs/litmus.md``.
"""
