"""Mosaic GPU: kernel calls, supported devices, and names that differ between jax 0.10.2, 0.11 and 0.12."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array

from jaxquant.core.sharding import fit_varying, varying_axes
from jaxquant.kernels.platforms import HAS_JAX_0_11
from jaxquant.kernels.varying import vary_alike

_API: Any = plgpu  # names that do not exist in all of these versions
REDUCTION_BYTES = 2048
"""Bytes of shared memory for reductions over the warps of a kernel."""
MEMORY_REGISTERS = {1: 40, 2: 40, 3: 32}
"""Number of multiplying warpgroups -> registers of a loading thread; a multiplying thread gets 256, 232 or 160.

Together they use the initial 255, 168 or 128 registers per thread; ``setmaxnreg`` would wait forever for more.
"""
_HOPPER = 132
"""Number of multiprocessors of an H100 or an H200."""


def swizzled(rows: int, columns: int, itemsize: int) -> dict[str, Any]:
    """Return the layout of a shared-memory tile that TMA, wgmma and register loads read without bank conflicts.

    Args:
      rows, columns: size of the tile; at least 8 rows and 32 bytes of columns.
      itemsize: number of bytes of an element.
    """
    swizzle = min(128, columns * itemsize)
    if rows % 8 or swizzle not in (32, 64, 128):
        raise ValueError(f"a tile of {rows}×{columns} elements of {itemsize} bytes cannot be swizzled")
    return {"transforms": (_API.TilingTransform((8, swizzle // itemsize)), _API.SwizzleTransform(swizzle))}


def load(ref: Any, layout: Any, *, is_optimized: bool = True) -> jax.Array:
    """Load a reference into registers.

    Args:
      ref: reference to shared or global memory.
      layout: layout of the registers.
      is_optimized: whether to raise for reads with bank conflicts.
    """
    index = () if HAS_JAX_0_11 else ((),)
    return plgpu.load(ref, *index, layout=layout, optimized=is_optimized)


def store(ref: Any, value: jax.Array, *, is_optimized: bool = True) -> None:
    """Store registers in shared or global memory; before jax 0.12, ``is_optimized`` has no effect."""
    if hasattr(plgpu, "store"):
        _API.store(ref, value, optimized=is_optimized)
    else:
        ref[...] = value


def transposed(ref: Any) -> Any:
    """Return a transposed view of a reference to a matrix."""
    return ref.T if HAS_JAX_0_11 else plgpu.transpose_ref(ref, (1, 0))


def call(
    body: Callable[..., None],
    operands: Sequence[Array | None],
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    interpret: bool,
    reduction_bytes: int = REDUCTION_BYTES,
    **options: Any,
) -> list[Array]:
    """Run a kernel; inside ``jax.shard_map`` its results vary along the axes of all operands.

    ``plgpu.kernel`` alone would mark its results as equal on all devices, and JAX would not sum their gradients.

    Args:
      body: kernel function.
      operands: arrays; None entries are omitted.
      results: shapes and dtypes of the results.
      interpret: whether to run without a GPU.
      reduction_bytes: ``REDUCTION_BYTES``, or 0 for a kernel whose warps do not reduce together.
      **options: other arguments of ``plgpu.kernel``.
    """
    alike, result = vary_alike(*operands)
    arrays = [each for each in alike if each is not None]
    semantics = plgpu.LoweringSemantics.Lane
    run = plgpu.kernel(
        body,
        out_type=[result(*each) for each in results],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics, reduction_scratch_bytes=reduction_bytes),
        interpret=_API.InterpretGPUParams() if interpret else None,
        **options,
    )
    return [fit_varying(each, varying_axes(arrays[0])) for each in run(*arrays)]


def count_multiprocessors() -> int:
    """Return the number of programs that run at once, one per multiprocessor; without a GPU, the number for an H100."""
    device = jax.devices()[0]
    return getattr(device, "core_count", _HOPPER) if device.platform == "gpu" else _HOPPER


def device_refusal(capability: tuple[int, int], least: int, most: int, interpret: bool) -> str | None:
    """Return the reason why a kernel does not support a device, or None if it does.

    Args:
      capability: compute capability of the device; see ``platforms.capability_of``.
      least, most: lowest and highest supported major number.
      interpret: whether to run without a GPU.
    """
    if interpret:
        return None if HAS_JAX_0_11 else "jax 0.10 has no public interpreter for Mosaic GPU kernels"
    if capability == (0, 0):
        return "a Mosaic GPU kernel needs an NVIDIA GPU of a known compute capability"
    if least <= capability[0] <= most:
        return None
    names = {8: "Ampere", 9: "Hopper", 10: "Blackwell"}
    return (
        f"the kernel needs a GPU of type {' or '.join(dict.fromkeys((names[least], names[most])))}, but the GPU has "
        f"compute capability {capability[0]}.{capability[1]}"
    )
