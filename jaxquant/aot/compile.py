"""Audit of a step for a chip that is not attached: export in this process, compilation in a separate process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxquant.aot.chips import Chip, chip
from jaxquant.aot.kernels import BLOCK_CALLS
from jaxquant.aot.memory import part_names
from jaxquant.aot.report import Audit
from jaxquant.aot.topology import environment, require_compiler
from jaxquant.core.typed import build
from jaxquant.ops.implementation import collect_choices

_RAISED = (ValueError, TypeError, NotImplementedError, OSError, ModuleNotFoundError)


def audit(step: Any, *shapes: Any, target: str, topology: str = "", name: str = "") -> Audit:
    """Compile a step with the real compiler of a chip that is not attached, and report the compiled program.

    The step is exported (``jax.export``) in this process and compiled in a separate process. ``outcome.compare``
    compares its 8-bit matmuls with the compiled matmuls; ``program.read_program`` describes what is counted.

    Args:
      step: function or jitted function. Donated arguments of the jitted function stay donated.
      shapes: pytrees of ``jax.ShapeDtypeStruct`` (or arrays). For several devices, pass shardings over a
        ``jax.sharding.AbstractMesh`` of as many devices.
      target: name of the chip: h100, h200, b200, v5e, v5p, v6e or v7x.
      topology: number of GPUs ("8") or TPU slice ("4x4"); empty is one GPU or the smallest slice.
      name: title of the report; empty is the step's own name.

    Raises:
      ValueError: the target is unknown, or the topology is not valid for the target or has too few devices.
      ModuleNotFoundError: the chip's compiler is not installed.
      RuntimeError: the compiler failed for a reason other than lack of memory.
    """
    described = chip(target)
    require_compiler(described, "flatbuffers")  # for jax.export
    jitted = step if hasattr(step, "lower") else jax.jit(step)
    leaves, tree = jax.tree.flatten(shapes)
    if not any(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in leaves):
        leaves = [_on_one_device(leaf, described) for leaf in leaves]
        shapes = jax.tree.unflatten(tree, leaves)
    names = part_names(jitted, shapes)
    with collect_choices() as choices:
        traced = jitted.trace(*shapes)
    donated = [index for index, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]

    def flat(*leaves: Any) -> Any:
        return jax.tree.leaves(jitted(*jax.tree.unflatten(tree, leaves)))  # export supports only standard node types

    kernel_calls = [jax.export.DisabledSafetyCheck.custom_call(each) for each in _KERNEL_CALLS]
    meshes = {leaf.sharding.mesh for leaf in leaves if isinstance(getattr(leaf, "sharding", None), NamedSharding)}
    if len(meshes) > 1:
        raise ValueError(f"the shapes are on {len(meshes)} different meshes; pass shardings over a single AbstractMesh")
    mesh = [
        (name, size, kind.name)
        for each in meshes
        for (name, size), kind in zip(each.shape.items(), each.axis_types, strict=True)
    ]
    exported = jax.export.export(jax.jit(flat), platforms=[described.platform], disabled_checks=kernel_calls)(*leaves)
    request = {
        "donated": donated,
        "mesh": mesh,
        "name": name or getattr(step, "__name__", "step"),
        "parts": names,
        "choices": choices,
    }
    return _run_worker(request | {"target": target, "topology": topology}, bytes(exported.serialize()))


_KERNEL_CALLS = ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu", "LayoutConstraint", BLOCK_CALLS[0])


def _on_one_device(leaf: Any, on: Chip) -> Any:
    """Return a shape on one abstract device of a chip, so that its type has the kind and platform of the device."""
    cores, platform = (on.gpu[0], "gpu") if on.gpu else (1, on.platform)
    device = AbstractDevice(device_kind=on.name, num_cores=cores, platform=platform)
    place = NamedSharding(AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device), PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def audit_program(
    program: str, config: str, overrides: Sequence[str], *, target: str, topology: str = "", name: str = ""
) -> Audit:
    """Audit the step that a plug-in builds, in the process that compiles it.

    Args:
      program: plug-in ``MODULE:FUNCTION``, a function of (config, overrides, devices) that returns (jitted step,
        shapes).
      config, overrides: arguments of the plug-in.
      target, topology: arguments of ``audit``.
      name: title of the report; empty is the config's stem.

    Raises:
      As in ``audit``, and the errors of the plug-in.
    """
    require_compiler(chip(target))
    request = {"program": program, "config": config, "overrides": list(overrides), "name": name or Path(config).stem}
    return _run_worker(request | {"target": target, "topology": topology})


def _run_worker(request: dict[str, Any], exported: bytes = b"") -> Audit:
    """Run a worker process on a request and an exported step, and return its audit."""
    with tempfile.TemporaryDirectory() as folder:
        request_path, answer_path, step = (Path(folder) / name for name in ("request.json", "answer.json", "step"))
        request_path.write_text(json.dumps(request | {"exported": str(step)}))
        step.write_bytes(exported)
        command = [sys.executable, "-m", "jaxquant.aot.worker", str(request_path), str(answer_path)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        answer = json.loads(answer_path.read_text()) if answer_path.is_file() else None
    if done.returncode or answer is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]+Error\b", line)]  # XLA's stack trace comes after the error
        raise RuntimeError(
            f"compilation of {request['name']!r} for {request['target']} failed with exit status {done.returncode}: "
            f"{(errors or lines or ['no message'])[-1]}"
        )
    if "error" in answer:
        raise {error.__name__: error for error in _RAISED}.get(answer["error"], ValueError)(answer["text"])
    return build(Audit, answer["audit"])
