# SPDX-License-Identifier: Apache-2.0
"""``host_builds.py FOLDER ARCH WORLD …``: what the stand-in runs when one of these ranks' code objects is launched.

For every kernel that the tests' table can choose, the code object for ``ARCH`` and the host build of the same
specialization, the latter as ``FOLDER/<hash of the code object>.so``; and what ``FLYCOMM_AOT_DIR`` loads. A process of
its own: it runs target host.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from flydsl._mlir import ir
from flydsl._mlir.execution_engine import ExecutionEngine
from flydsl.compiler.jit_function import _create_mlir_context

from flycomm import _shim, kernels, targets
from flycomm.compile import _lowered
from flycomm.kernels import Specialization, _ahead, _specialization
from flycomm.tables import OPS, Table, parse
from flycomm.targets._host_lowering._build import size_of

TABLE = Path(__file__).with_name("table.json")
DTYPES = ("f32", "bf16")
WAVE = 64

_ENTRY = "void {symbol}(void *, void **);\n"
_SIZES = "static const int sizes_{number}[] = {{{sizes}}};\n"
_ROW = '{{"{name}", {symbol}, {shared}, {wave}, {count}, sizes_{number}}}, '
_TABLE = """struct build { const char *name; void (*entry)(void *, void **); long shared; int wave, count;
const int *sizes; } const standin_builds[] = {"""


def wanted(table: Table, world: int) -> Iterator[Specialization]:
    """Sums in :data:`DTYPES`, gathers, signals and barriers."""
    yield from (kernels.rank_barrier(world), kernels.put_signal(world), kernels.wait_signal(world))
    for row in table.rows:
        if row.op == OPS[2]:
            yield kernels.all_gather(world, row.geometry, row.protocol)
            continue
        build = kernels.all_reduce if row.op == OPS[0] else kernels.reduce_scatter
        yield from (build(world, dtype, row.geometry, row.protocol) for dtype in DTYPES)
        if row.op == OPS[0] and row.largest is None:
            yield kernels.all_reduce_symmetric(world, DTYPES[0], row.geometry, "sum", True)


def fnv1a(data: bytes) -> int:
    """As standin_module.c hashes a code object."""
    found = 0xCBF29CE484222325
    for byte in data:
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return found


def build(specialization: Specialization, arch: str, folder: Path) -> None:
    with targets.compiling_for("rocm", arch):
        lowered = _lowered.lower(specialization.launcher(), specialization.placeholders())
        _ahead.keep(specialization, folder)  # as python -m flycomm compile does it
    _specialization._build.cache_clear()
    (data,) = lowered.binaries.values()
    launch_types = {launch.kernel: launch for launch in lowered.launches}
    library = folder / f"{fnv1a(data):016x}.so"
    if library.exists():
        return
    handle = kernels.compiled(specialization)
    with _create_mlir_context():
        module = ir.Module.parse(handle._keepalive._ir_text)
        rows, entries = [], ""
        for number, (name, launch) in enumerate(launch_types.items()):
            symbol = f"fc_{launch.binary}_{name}"
            sizes, shared = _launched(module, name, launch)
            entries += _ENTRY.format(symbol=symbol)
            entries += _SIZES.format(number=number, sizes=", ".join(map(str, sizes)))
            rows.append(
                _ROW.format(name=name, symbol=symbol, shared=shared, wave=WAVE, count=len(sizes), number=number)
            )
        engine = ExecutionEngine(module, opt_level=2, shared_libs=[str(_shim.path())], enable_object_dump=True)
        engine.initialize()
        engine.raw_lookup(handle._keepalive._entry)
        engine.dump_to_object_file(str(library.with_suffix(".o")))
    source = library.with_suffix(".c")
    source.write_text(entries + _TABLE + "".join(rows) + "{0}};\n")
    objects = [str(source), str(library.with_suffix(".o")), str(_shim.path())]
    unfinished = str(library.with_suffix(".part"))
    # FlyDSL's engine makes code for one address; the loader may move it as long as text relocations are allowed.
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-z,notext", "-o", unfinished, *objects]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    Path(unfinished).rename(library)


def _launched(module: ir.Module, name: str, launch: _lowered.Launch) -> tuple[list[int], int]:
    """Bytes of each argument, and of static shared memory, as the host's launcher hands them to ``fc_host_launch``."""
    calls: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "llvm.call" and "fc_host_launch" in str(op.attributes["callee"]):
            calls.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    (call,) = calls
    shared = ir.IntegerAttr(call.operands[8].owner.attributes["value"]).value
    params = call.operands[1]
    stored: dict[int, int] = {}
    for use in params.uses:
        op = use.owner
        if op.name == "llvm.store" and op.operands[1] == params:
            stored[0] = _size_in(op.operands[0])
        elif op.name == "llvm.getelementptr":
            (byte,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
            (store,) = [one.owner for one in op.results[0].uses]
            stored[byte // 8] = _size_in(store.operands[0])
    return [stored[index] for index in sorted(stored)], shared


def _size_in(slot: ir.Value) -> int:
    return size_of(ir.TypeAttr(slot.owner.attributes["elem_type"]).value)


def main(folder: Path, arch: str, worlds: list[int]) -> None:
    targets.activate(targets.get("host"))
    table = parse(json.dumps(json.loads(TABLE.read_text()) | {"arch": arch}), TABLE.name)
    for world in worlds:
        for specialization in dict.fromkeys(wanted(table, world)):
            build(specialization, arch, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(one) for one in sys.argv[3:]])
