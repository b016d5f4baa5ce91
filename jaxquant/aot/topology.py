"""Devices of a chip that is not attached, as its compiler describes them.

Use this module only in a separate process with the variables of ``environment``. In other processes, JAX searches for
devices of every installed plug-in.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
from typing import Any

from jaxquant.aot.chips import CHIPS, Chip, gpu_target

NEEDED = {"cuda": ("audit-gpu", "jax_plugins.xla_cuda12"), "tpu": ("audit-tpu", "libtpu")}
"""Platform -> extra that installs the platform's compiler, and a module that exists if the compiler is installed."""

TIED_TO_JAXLIB = ("jax-cuda12-pjrt", "jax-cuda12-plugin")
"""Packages of the GPU compiler, which must have jaxlib's version; libtpu has its own versions."""

DEFAULT_TOPOLOGY = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "v7x": "2x2x1"}
"""Smallest slice of each TPU that its compiler supports."""


def environment() -> dict[str, str]:
    """Return the environment variables of a process that compiles for chips that are not attached.

    The variables disable autotuning, which times the tilings of Triton's matmuls on a device.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_COMPILATION_CACHE_DIR": "",
    }


def require_compiler(chip: Chip, *more: str) -> None:
    """Check that a chip's compiler is installed and matches jaxlib, and that other modules of its extra are installed.

    Args:
      chip: chip of the compiler.
      more: names of further modules that must be installed.

    Raises:
      ModuleNotFoundError: a module is not installed.
      RuntimeError: the compiler and jaxlib have different versions.
    """
    extra, needed = NEEDED[chip.platform]
    missing = [module for module in (needed, *more) if not _is_installed(module)]
    if missing:
        other = {"cuda": "TPUs '.[audit-tpu]'", "tpu": "GPUs '.[audit-gpu]'"}[chip.platform]
        raise ModuleNotFoundError(
            f"target {_name(chip)!r} needs {' and '.join(missing)}, which is not installed; "
            f"run pip install -e '.[{extra}]' (for {other}) in the checkout of jaxquant"
        )
    wanted = importlib.metadata.version("jaxlib")
    for package in TIED_TO_JAXLIB if chip.platform == "cuda" else ():
        for found in importlib.metadata.Distribution.discover(name=package):
            if found.version != wanted:
                raise RuntimeError(
                    f"target {_name(chip)!r} needs {package} {wanted} for jaxlib {wanted}, but {package} "
                    f"{found.version} is installed; run pip install {package}=={wanted}"
                )


def _is_installed(module: str) -> bool:
    parents = module.split(".")
    return all(importlib.util.find_spec(".".join(parents[: n + 1])) for n in range(len(parents)))


def _name(chip: Chip) -> str:
    return next(name for name, each in CHIPS.items() if each is chip)


def devices(chip: Chip, topology: str = "") -> list[Any]:
    """Return the devices of a slice of chips that are not attached.

    Args:
      chip: chip, which need not be attached.
      topology: number of GPUs ("8", "64") or TPU slice ("8x8", "4x4x4"); empty is one GPU, or the smallest TPU slice.

    Raises:
      ValueError: the topology is not valid for the chip, or its compiler does not support the topology.
    """
    from jax.experimental import topologies

    name = _name(chip)
    if not re.fullmatch(
        r"\d+" if chip.platform == "cuda" else r"\d+(x\d+){1,2}", topology or DEFAULT_TOPOLOGY.get(name, "1")
    ):
        shape = "a number of devices, such as '8'" if chip.platform == "cuda" else "a slice, such as '8x8' or '4x4x4'"
        raise ValueError(f"topology {topology!r} is not valid for target {name!r}; pass {shape}")
    if chip.platform == "cuda":
        _assume_cudnn(chip)
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=name, target_config=gpu_target(chip), topology=f"1x1x{topology or 1}"
        )
    else:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name}:{topology or DEFAULT_TOPOLOGY[name]}"
        )
    return list(found.devices)


def _assume_cudnn(chip: Chip) -> None:
    """Replace jax's checks for cuDNN attention, so that they answer for the target GPU.

    The original checks query the first local device and the loaded library. Only this process is affected, and this
    process only compiles for the target.
    """
    try:
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    except ModuleNotFoundError:
        return
    capability = f"{chip.gpu[3]}.0" if chip.gpu else ""
    for name, answer in (
        ("check_cudnn_version", lambda: 91000),
        ("check_compute_capability", lambda wanted: float(capability) >= float(wanted)),
        ("is_cuda_compute_capability_equal", lambda wanted: capability == str(wanted)),
    ):
        if hasattr(module, name):
            setattr(module, name, answer)
