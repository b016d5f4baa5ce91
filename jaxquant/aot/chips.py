"""Table of chips that an audit compiles for: compiler description, memory, peak rates, achieved shares of the peaks.

Peak rates are dense (without structured sparsity), from data sheets:

- H100 SXM, H200, B200: NVIDIA's data sheets (H100 and H200: 989 TFLOP/s bf16, 1979 fp8 and int8; HGX B200 per GPU: 2250
  and 4500), float32 as TF32, NVLink in both directions together.
- v5e, v5p, v6e, v7x (Ironwood): Google Cloud's TPU system architecture pages, per chip. v5e, v5p and v6e have no fp8
  unit: their fp8 matmuls run at the rate of bf16. v7x has an fp8 unit. Its int8 rate is not published; the bf16 rate is
  assumed. At default precision, a float32 matmul runs as one bf16 matmul.

Four-bit floats (``fp4``):

- B200 has an fp4 unit: 9000 TFLOP/s, from the HGX B200 data sheet. The unit multiplies operands with block scales,
  nvfp4 and mxfp4. A matmul of fp4 by fp8 runs at the rate of fp8 (PTX ISA, ``tcgen05.mma`` of kind ``mxf4``,
  ``mxf4nvf4`` and ``f8f6f4``).
- H100 and H200 have no fp4 unit, and XLA converts fp4 operands to bf16 first: e4m3 by e2m1 is compiled to a cuBLAS
  matmul of bf16 (jax 0.10.2). The bf16 rate is used.
- No TPU of this table has an fp4 unit. The compiler accepts e2m1 operands and converts them inside the matmul. It
  estimates about as many cycles for a 4096³ matmul of e2m1 as of bf16: 1113 and 1083 thousand on v5e, 303 and 302 on
  v6e, 328 and 316 on v7x (libtpu 0.0.42.1). The bf16 rate is therefore used for all TPUs. On v7x, e4m3 would take 151
  thousand cycles.

Links: the data sheets state NVLink and ICI rates for both directions together; one direction has half of the rate. For
traffic outside its NVLink domain (the eight GPUs of an HGX board), a GPU has a network card with 400 Gb/s in each
direction, as in DGX H100 and B200.

TPU clocks are not published. The clocks here are computed from the peak rate and the matrix units, with two operations
per cell and cycle:

- v5e: 4 matrix units of 128 by 128 cells, 1.5 GHz.
- v5p: 8 matrix units of 128 by 128 cells, 1.75 GHz.
- v6e: 4 matrix units of 256 by 256 cells, 1.75 GHz.
- v7x: 8 matrix units of 256 by 256 cells, 2.2 GHz.

Shares of peak (``shares``) are fitted to one measurement: TransformerEngine's layer GEMM set on an H200 NVL (forward
and both gradients, 15872 tokens; docs/examples/gemm_profiling).

- bf16: 32.014 ms, which is 599 of 835 TFLOP/s.
- fp8, with operands that are already quantized: 16.785 ms, which is 1142 of 1671 TFLOP/s.
- Quantization of 1.241e9 elements: 2.19 ms with delayed scaling (4 bytes read or written per element), 3.50 ms with
  current scaling (6 bytes). On average, this is 2.20 of 4.8 TB/s.

These shares are used for every GPU: the fp8 share also for int8 and fp4, the bf16 share also for f32. For TPUs, the
compiler's cycles are used instead.

Four-bit integers run at the rate of int8. On TPUs, the compiler's estimates for int4 and int8 agree (541 and 542
thousand cycles on v5e, 224 and 227 on v6e). For GPUs, no int4 rate is published.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Platform = Literal["cuda", "tpu"]


@dataclasses.dataclass(frozen=True)
class Chip:
    """Target of an audit.

    Attributes:
      platform: platform of the compiler.
      name: name of the chip for the compiler.
      peak: dense operations per second by kind of matmul (``bf16``, ``fp8``, ``fp4``, ``int8``, ``f32``).
      bandwidth: memory bandwidth of the chip, bytes/s.
      memory: memory of the chip, bytes.
      link: bytes/s of a chip's links to its neighbours, both directions together.
      devices: JAX devices of one chip (v7x: two).
      gpu: description for the GPU compiler: cores, L2 bytes, clock in GHz, compute capability.
      clock: cycles per second of a TPU.
      domain: number of chips that NVLink connects, or 0 if all links are of one kind.
      network: bytes/s that a chip can send to chips outside its domain.
      shares: achieved shares of peak rates (``memory``: of the bandwidth); 1 by default.
    """

    platform: Platform
    name: str
    peak: dict[str, float]
    bandwidth: float
    memory: float
    link: float
    devices: int = 1
    gpu: tuple[int, int, float, int] | None = None
    clock: float = 0.0
    domain: int = 0
    network: float = 0.0
    shares: dict[str, float] = dataclasses.field(default_factory=dict)


def _rates(bf16: float, fp8: float, int8: float, f32: float, fp4: float | None = None) -> dict[str, float]:
    """Return operations per second by kind of matmul, from TFLOP/s; the fp4 rate defaults to the bf16 rate."""
    rates = {"bf16": bf16, "fp8": fp8, "fp4": fp4 or bf16, "int8": int8, "f32": f32}
    return {kind: rate * 1e12 for kind, rate in rates.items()}


GPU_SHARES = {"bf16": 0.717, "f32": 0.717, "fp8": 0.684, "int8": 0.684, "fp4": 0.684, "memory": 0.458}


def _gpu(name: str, peak: dict[str, float], bandwidth: float, memory: float, link: float, **fields: Any) -> Chip:
    return Chip("cuda", name, peak, bandwidth, memory, link, network=50e9, shares=GPU_SHARES, **fields)


_HOPPER, _H200 = _rates(989, 1979, 1979, 494), (132, 62914560, 1.98, 9)
_H200_NVL, _B200 = _rates(835, 1671, 1671, 417), _rates(2250, 4500, 4500, 1125, 9000)

CHIPS: dict[str, Chip] = {
    "h100": _gpu("NVIDIA H100", _HOPPER, 3.35e12, 80e9, 900e9, gpu=(132, 52428800, 1.98, 9), domain=8),
    "h200": _gpu("NVIDIA H200", _HOPPER, 4.8e12, 141e9, 900e9, gpu=_H200, domain=8),
    "h200-nvl": _gpu("NVIDIA H200 NVL", _H200_NVL, 4.8e12, 141e9, 900e9, gpu=_H200, domain=4),
    "b200": _gpu("NVIDIA B200", _B200, 8.0e12, 180e9, 1800e9, gpu=(148, 132644864, 1.965, 10), domain=8),
    "v5e": Chip("tpu", "v5e", _rates(197, 197, 394, 197), 0.819e12, 16e9, 200e9, clock=1.5e9),
    "v5p": Chip("tpu", "v5p", _rates(459, 459, 918, 459), 2.765e12, 95e9, 600e9, clock=1.75e9),
    "v6e": Chip("tpu", "v6e", _rates(918, 918, 1836, 918), 1.64e12, 32e9, 448e9, clock=1.75e9),
    "v7x": Chip("tpu", "tpu7x", _rates(2307, 4614, 2307, 2307), 7.38e12, 192e9, 1200e9, 2, clock=2.2e9),
}
"""Chips by the name of the target in commands."""


def chip(target: str) -> Chip:
    """Return the chip of a target.

    Raises:
      ValueError: the target is not in ``CHIPS``.
    """
    if target not in CHIPS:
        raise ValueError(f"target {target!r} is not a known chip; use one of {', '.join(CHIPS)}")
    return CHIPS[target]


def gpu_target(chip: Chip) -> str:
    """Return a GPU's description for XLA, as CUDA would report it: a ``GpuTargetConfigProto`` in text form."""
    assert chip.gpu is not None
    cores, l2, clock, capability = chip.gpu
    return (
        "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128 "
        "shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472 "
        "registers_per_block_limit: 65536 registers_per_core_limit: 65536 "
        "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
        f"core_count: {cores} l2_cache_size: {l2} clock_rate_ghz: {clock} "
        f"memory_bandwidth: {int(chip.bandwidth)} device_memory_size: {int(chip.memory)} "
        # XLA of jax 0.12 reads the first cuDNN version, XLA of jax 0.10 the second.
        f'cuda_compute_capability {{ major: {capability} }} dnn_version: "9.10.0" }} '
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
        f'runtime_version {{ major: 12 minor: 9 patch: 0 }} device_description_str: "{chip.name}"'
    )
