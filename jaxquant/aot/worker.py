"""Compilation of one step for a chip that is not attached, in a separate process (``topology.environment``).

``python -m jaxquant.aot.worker REQUEST.json ANSWER.json``. A request contains a target, a topology and either an
exported function (``exported``, ``donated``, ``mesh``) or a plug-in that builds the step (``program``, ``config``,
``overrides``).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
import time
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxquant.aot import report
from jaxquant.aot.chips import Chip, chip
from jaxquant.aot.invariance import find_variant_operations
from jaxquant.aot.memory import part_names, part_rows
from jaxquant.aot.outcome import compare
from jaxquant.aot.plugin import load_program
from jaxquant.aot.price import estimate
from jaxquant.aot.program import read_program
from jaxquant.aot.topology import devices
from jaxquant.core.sharding import on_device_of
from jaxquant.ops.implementation import collect_choices

PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "nvidia-cuda-nvcc-cu12")


def main(request_path: str, answer_path: str) -> int:
    """Compile the step of a request and write the answer: an audit, or an error that the user can fix.

    Args:
      request_path: JSON file to read.
      answer_path: JSON file to write.
    """
    request = json.loads(Path(request_path).read_text())
    try:
        answer: dict[str, Any] = {"audit": dataclasses.asdict(_compile_request(request))}
    except (ValueError, TypeError, NotImplementedError, OSError, ModuleNotFoundError) as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    Path(answer_path).write_text(json.dumps(answer))
    return 0


def _compile_request(request: dict[str, Any]) -> report.Audit:
    target = chip(request["target"])
    absent = devices(target, request["topology"])
    if "program" in request:
        step, shapes = load_program(request["program"])(request["config"], request["overrides"], absent)
        request["parts"] = part_names(step, shapes)
    else:
        step, shapes, absent = _load_exported(request, absent)
    return compile_step(step, shapes, target, len(absent), request)


def _load_exported(request: dict[str, Any], absent: list[Any]) -> tuple[Any, Any, list[Any]]:
    """Return an exported function of flat arguments, their shapes on the target's devices, and these devices."""
    exported = jax.export.deserialize(bytearray(Path(request["exported"]).read_bytes()))
    count = exported.nr_devices
    if count > len(absent):
        raise ValueError(
            f"the step needs {count} devices, but topology {request['topology']!r} of {request['target']} has "
            f"{len(absent)}; use a larger topology"
        )
    names, sizes, kinds = zip(*(request["mesh"] or [("devices", count, "Auto")]), strict=True)
    mesh = Mesh(np.array(absent[:count]).reshape(sizes), names, axis_types=tuple(AxisType[kind] for kind in kinds))
    shardings = exported.in_shardings_jax(mesh)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or replicated)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    return jax.jit(exported.call, donate_argnums=tuple(request["donated"])), shapes, absent[:count]


def compile_step(step: Any, shapes: Any, target: Chip, count: int, request: dict[str, Any]) -> report.Audit:
    """Compile a jitted step and return its audit.

    Args:
      step: jitted function.
      shapes: arguments of the function, on devices of the target.
      target: chip of the compiler.
      count: number of devices of the program.
      request: ``name``, ``target`` and ``topology`` for the report, and ``parts``, the part of each argument's leaf.

    Raises:
      NotImplementedError: the installed libtpu compiles programs that this jax cannot read.
      jax.errors.JaxRuntimeError: the compiler failed for a reason other than lack of memory.
    """
    began = time.perf_counter()
    with on_device_of(shapes), collect_choices() as choices:
        lowered = step.lower(*shapes)
    requested = read_program(lowered.compiler_ir("hlo").as_hlo_module().to_string(), is_optimized=False)
    made, memory, figures, refusal = requested, {}, {}, ""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if target.platform == "tpu" and "RET_CHECK failure (external/xla/xla/hlo/ir" in str(error):
            raise NotImplementedError(_version_error(request["target"])) from error
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refusal = " ".join(str(error).split())
    else:
        made = read_program(compiled.as_text())
        memory, figures = _memory(compiled.memory_analysis(), target), report.figures(made)
        figures["roofline"] = estimate(target, made, devices=count)
        figures["variant_operations"] = find_variant_operations(compiled)
    return report.Audit(
        name=request["name"],
        target=request["target"],
        topology=request["topology"],
        devices=count,
        fits=not refusal and memory["peak"] <= memory["capacity"],
        refusal=refusal,
        memory=memory,
        outcome=compare(requested, made, 1 if refusal else count),
        compile_seconds=round(time.perf_counter() - began, 1),
        choices=request.get("choices", choices),
        parts=part_rows(request["parts"], shapes, count) if "parts" in request else [],
        versions={name: found.version for name in PACKAGES for found in Distribution.discover(name=name)},
        **figures,
    )


def _version_error(target: str) -> str:
    """Return the error for a jaxlib that cannot read the programs of libtpu, because their versions do not match."""
    jax_version, libtpu = (importlib.metadata.version(name) for name in ("jax", "libtpu"))
    wanted = next((each.split(";")[0] for each in importlib.metadata.requires("jax") or () if "libtpu" in each), "")
    return (
        f"target {target!r}: jax {jax_version} cannot read the program that libtpu {libtpu} compiled; this jax is "
        f"made for {wanted or 'another version'}; run pip install 'jax[tpu]=={jax_version}'"
    )


def _memory(stats: Any, target: Chip) -> dict[str, int]:
    """Return the bytes of a device. The peak has arguments, temporaries, code, and outputs in separate memory."""
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    code = stats.generated_code_size_in_bytes
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": outputs,
        "temporaries": stats.temp_size_in_bytes,
        "peak": stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes + code,
        "capacity": int(target.memory / target.devices),
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
