"""Registry of custom calls: kernels that multiply, calls that only move data, and calls that cost nothing.

A compiler cannot count the operations of a hand-written kernel, so the registry counts them for each known kernel. The
report lists unknown kernels by name, and counts each as a move of its operands and results.
"""

from __future__ import annotations

import dataclasses
import math
import re

from jaxquant.aot.hlo import Array, Instruction
from jaxquant.kernels.fp8_einsum.reference import NAME

MATMUL_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__cublas$lt$groupedMatmul")
"""Library calls that are one matrix product; ``program.read_program`` reads their contracted dimensions."""

BLOCK_CALLS = ("__op$block_scaled_dot", "__cudnn$blockScaledDot")
"""Calls that multiply operands with block scales and contract the last axes, before and after compilation."""

_OWN = re.compile(r"\bjaxquant_(?:fp8_einsum|block_matmul(?:_grouped(?:_drhs)?)?)\b")
"""Pattern for the names of our GPU kernels that are matrix products and contract the last axes."""

MOVES = re.compile(r"__cub\$DeviceRadixSort.*|(__gpu\$)?TopK|PadToStatic|SliceToDynamic")
"""Pattern of the targets of custom calls that only move or sort their operands."""
NO_WORK = re.compile("AllocateBuffer|ConcatBitcast|Sharding|SPMD.*|AssumeGatherIndicesInBound|annotate.*")
"""Pattern of the targets of custom calls that only rename, annotate or allocate arrays."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A custom call with a known number of operations.

    Attributes:
      name: name in the registry.
      dtype: HLO dtype of the operands of its products.
      flops: operations of one run, without the products that a causal mask removes.
      bytes: operands and results of one run in HBM.
      path: path in the traced program.
      times: number of runs in a step.
      cycles: cycles of one run on a TPU, if its schedule is known, otherwise 0.
    """

    name: str
    dtype: str
    flops: int
    bytes: int
    path: str
    times: int
    cycles: int = 0


def product_name(target: str, path: str) -> str:
    """Return the name of the matrix product that a custom call computes, or "" for another call.

    Args:
      target: target of the call.
      path: path of the call in the traced program.
    """
    if target.startswith("mosaic_gpu") and (own := _OWN.search(path)):
        return own[0]
    return target if target in MATMUL_CALLS + BLOCK_CALLS else ""


def is_own_matmul(target: str, path: str) -> bool:
    """Check whether a custom call is our matmul of operands without blocks, for GPUs or TPUs; see ``product_name``."""
    return target.startswith(("mosaic_gpu", "tpu_custom_call")) and bool(re.search(rf"\b{NAME}\b", path))


def has_blocks(name: str) -> bool:
    """Check whether a product with this name has scales for blocks of its operands."""
    return name in BLOCK_CALLS or name.startswith("jaxquant_block_matmul")


def contracts_last(name: str) -> bool:
    """Check whether a product with this name contracts the last axes of its operands."""
    return name in BLOCK_CALLS or bool(_OWN.fullmatch(name))


def find_kernel(instruction: Instruction, operands: list[Array], moved: int, path: str, times: int) -> Kernel | None:
    """Return the kernel of a custom call, or None if it is not in the registry.

    Args:
      instruction: custom call.
      operands: types of its operands.
      moved: bytes of its operands and results in HBM.
      path: path of the call in the traced program.
      times: number of runs in a step.
    """
    for pattern, read in _REGISTRY:
        if re.search(pattern, f"{instruction.target} {path}"):
            name, dtype, flops, *cycles = read(instruction, operands, path)
            return Kernel(name, dtype, flops, moved, path, times, *cycles)
    return None


def _describe_cudnn(instruction: Instruction, operands: list[Array], path: str) -> tuple[str, str, int]:
    """Describe cuDNN attention: two matmuls over the scores forward, five backward; a causal mask halves the work."""
    found = re.search(r'"intermediate_tensor_shape": ?\{[^}]*?"dimensions": ?\[([^\]]*)\]', instruction.rest)
    scores = math.prod(int(size.strip(' "')) for size in found[1].split(",")) if found else 0
    is_causal = bool(re.search(r'"mask_type": ?"[A-Z_]*CAUSAL', instruction.rest))
    backward = "Backward" in instruction.target
    flops = 2 * (5 if backward else 2) * scores * operands[0].shape[-1] // (2 if is_causal else 1)
    masked = "causal " if is_causal else ""
    return f"cuDNN {masked}attention {'backward' if backward else 'forward'}", operands[0].dtype, flops


_SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
"""Number of matmuls over the scores in each of splash attention's kernels."""


def _describe_splash(instruction: Instruction, operands: list[Array], path: str) -> tuple[str, str, int]:
    """Describe splash attention, which skips masked blocks. The program has no mask; a causal mask is assumed."""
    found = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", path)
    kind = found[1] if found else "fwd"
    query, key = [array for array in operands if array.dtype in ("bf16", "f32", "f16") and len(array.shape) >= 3][:2]
    matmuls = _SPLASH[kind] + (kind == "dkv" and 'use_fused_bwd_kernel\\": true' in instruction.rest)
    flops = 2 * matmuls * math.prod(query.shape) * key.shape[-2] // 2
    return f"splash attention {kind}", query.dtype, flops


def _describe_einsum(instruction: Instruction, operands: list[Array], path: str) -> tuple[str, str, int]:
    """Describe our TPU matmul in any order of axes: the sizes B·M·K, B·N·K and B·M·N multiply to B (B·M·N·K)²."""
    lhs, rhs, out = (math.prod(each.shape) for each in (*operands[:2], instruction.arrays[0]))
    return "jaxquant fp8_einsum", operands[0].dtype, 2 * math.isqrt(lhs * rhs * out // operands[0].shape[0])


def _describe_quantize(instruction: Instruction, operands: list[Array], path: str) -> tuple[str, str, int]:
    """Describe our quantization kernel. The kernel has no products; its bytes determine its time."""
    return "jaxquant quantize", operands[0].dtype, 0


_CYCLES_OF_RESULT = {False: (6 / 1024, 5 / 1024), True: (8 / 1024, 7 / 1024)}
"""Whether blocks are small -> cycles per quantized and per bf16 element of block quantization on v6e."""


def _describe_block_quantize(instruction: Instruction, operands: list[Array], path: str) -> tuple[str, str, int, int]:
    """Describe our block quantization kernel; on TPUs its arithmetic determines its time, on GPUs its bytes do."""
    size = math.prod(operands[0].shape)
    found = _CYCLES_OF_RESULT["block_quantize_32" in path]
    written = instruction.arrays if instruction.target == "tpu_custom_call" else []
    cycles = [found[each.dtype == "bf16"] for each in written if math.prod(each.shape) == size]
    return "jaxquant block_quantize", operands[0].dtype, 0, round(size * sum(cycles))


_REGISTRY = (
    (r"^(tpu_custom_call|mosaic_gpu).*\bjaxquant_block_quantize(_32)?\b", _describe_block_quantize),
    (r"^tpu_custom_call.*\bjaxquant_fp8_einsum\b", _describe_einsum),
    (r"^(tpu_custom_call|mosaic_gpu).*\bjaxquant_quantize\b", _describe_quantize),
    (r"^__cudnn\$fmha", _describe_cudnn),
    (r"^tpu_custom_call .*splash_m[hq]a_(fwd|dkv|dq)", _describe_splash),
)
"""Pattern of a call's target and path -> function that returns the call's name, dtype and operations."""
