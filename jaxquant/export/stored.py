"""Linear layers of foreign checkpoints: elements, scales and zero points, as the checkpoint's config describes them.

The writer of each packing is next to its reader. A reader removes each tensor that it uses from the layer's dict. A
tensor that remains could change the layer's values, so it raises an error.

Source: the compressors of compressed-tensors; the checkpoint exporters of modelopt and of DeepSeek-V3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor, make_qtensor
from jaxquant.core.tensor_spec import TensorSpec
from jaxquant.export.hf import LayerSpec, OperandSpec, ScaleGranularity
from jaxquant.export.layouts import (
    NVFP4_RANGE,
    Tensors,
    decode_scaled,
    encode_mxfp4,
    encode_nvfp4,
    encode_scaled,
    encode_scaled_blocks,
    is_true,
    pack_e2m1,
    pack_int4,
    reciprocal,
    scale_of,
    shorten,
    unpack_e2m1,
    unpack_int,
)
from jaxquant.export.source import ScaledElements, Source

_Own = ScaledElements | None
"""Elements and scales of a layer that is already in the format, or None."""
_SCALE_DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e8m0fnu, np.uint8)
_INPUT_SCALE_NAMES = (".input_scale", ".activation_scale", ".input_global_scale")
_AMAX_PER_SCALE = {**{name: element(name).bound for name in ("float8_e4m3fn", "int8")}, "float4_e2m1fn": NVFP4_RANGE}
"""Ratio of the input amax to the static input scale, by element type."""


@dataclasses.dataclass(frozen=True)
class StoredLayer:
    """Weight of a linear layer, ``(elements − zero_point) · scale``.

    Attributes:
      elements: array [out, in] of the type in the config; int8 for int4.
      scale: scale of each block, float32.
      block: rows and columns that share a scale.
      zero_point: zero point of each block, int8 in the shape of ``scale``, or None.
      levels: stored block scales and the outer scale [1], for formats with two levels of scales; otherwise None.
    """

    elements: np.ndarray
    scale: np.ndarray
    block: tuple[int, int]
    zero_point: np.ndarray | None = None
    levels: tuple[np.ndarray, np.ndarray] | None = None

    def to_qtensor(self, spec: OperandSpec | TensorSpec, input_scale: Any = None) -> QTensor:
        """Return the weight [out, in] as a ``QTensor``, with elements and scales in the dtypes of a spec.

        Args:
          spec: spec of the weight.
          input_scale: static scale [1, 1] of the input, or None.
        """
        scale, outer = self.levels or (self.scale, None)
        elements: Any = self.elements.astype(spec.dtype, copy=False)
        scales: Any = scale.astype(spec.scale_dtype, copy=False)
        zero_point: Any = None if self.zero_point is None else self.zero_point.astype(spec.dtype)
        outer_scale: Any = None if outer is None else outer.reshape(1, 1)
        return make_qtensor(elements, scales, zero_point, outer_scale, self.block, input_scale=input_scale)

    def decode(self) -> np.ndarray:
        """Return the weight in float32; each value is rounded once, and becomes infinite if it overflows."""
        with np.errstate(over="ignore"):
            return decode_scaled(self.elements, self.scale, self.block, self.zero_point)


def stored_shape(spec: LayerSpec, tensors: Tensors) -> tuple[int, ...]:
    """Return the shape [out, in] of a linear layer whose model is not known; columns can be packed."""
    if ".weight_shape" in tensors:
        return tuple(tensors[".weight_shape"].tolist())
    stored = tensors.get(".weight_packed", tensors.get(".weight", np.empty((0, 0))))
    per_element = 1 if spec.packing == "plain" else 8 * stored.dtype.itemsize // element(spec.weight.dtype).bits
    return (*stored.shape[:-1], stored.shape[-1] * per_element)


def read_layer(spec: LayerSpec, tensors: Tensors, shape: tuple[int, ...]) -> StoredLayer:
    """Read a linear layer, as the checkpoint's config describes it.

    Args:
      spec: quantization of the layer in the config.
      tensors: tensors of the layer, by the suffix of their name (``.weight_scale``).
      shape: [out, in] in the model.

    Raises:
      ValueError: a tensor is missing, unused, or has another shape or dtype; the message names it.
      NotImplementedError: the layout is not supported.
    """
    if spec.packing not in _PACKINGS:
        raise NotImplementedError(f"weights packed as {spec.packing!r} are not supported; use another export")
    if spec.weight.granularity is ScaleGranularity.COLWISE:
        raise NotImplementedError("a weight with a scale per column is not supported; export it with a scale per row")
    unused = _UnusedTensors(tensors)
    layer = _PACKINGS[spec.packing].read(spec, shape, unused)
    take_input_amax(spec, unused)
    unused.check_empty()
    return layer


def write_layer(spec: LayerSpec, source: Source, module: str, weight: np.ndarray) -> Tensors:
    """Return the tensors of a linear layer by the suffix of their name, as ``read_layer`` reads them.

    Args:
      spec: quantization of the layer in the config of the format.
      source: model; a layer that is already in the format keeps its elements and scales.
      module: name of the layer.
      weight: [out, in] in float32.

    Raises:
      ValueError: the format needs a static scale of an input that was not measured.
    """
    own, write = source.scaled_elements(module, spec.weight), _PACKINGS[spec.packing].write
    tensors = write(spec, source, module, weight, own)
    if own is not None and not is_true(own.is_exact, if_traced=False):
        others = write(spec, source, module, weight, None)
        tensors = {end: jnp.where(own.is_exact, part, others[end]) for end, part in tensors.items()}
    if spec.input is not None and spec.has_static_input:
        scale = scale_of(source.fused_input_amax(module), _AMAX_PER_SCALE[spec.input.dtype])
        is_reciprocal = spec.packing == "nvfp4-pack"
        tensors |= {".input_global_scale": reciprocal(scale)} if is_reciprocal else {".input_scale": scale}
    return tensors


def take_input_amax(spec: LayerSpec, tensors: Tensors) -> float | None:
    """Remove the static input scale of a layer from its tensors; returns the amax that the scale represents, or None.

    Args:
      spec, tensors: arguments of ``read_layer``.

    Raises:
      ValueError: the scale is not a single number above 0.
    """
    if spec.input is None or not spec.has_static_input:
        return None
    name = next((name for name in _INPUT_SCALE_NAMES if name in tensors), None)
    if name is None:
        return None
    scale = tensors.pop(name)
    value = _positive_scalar(scale, "the static scale of the input")
    largest = _AMAX_PER_SCALE.get(spec.input.dtype)
    if largest is None:
        raise ValueError(f"a static scale of {spec.input.dtype} inputs is not supported; export with dynamic scales")
    return largest / value if spec.packing == "nvfp4-pack" else largest * value


class _UnusedTensors(Tensors):
    """Tensors of a layer that no reader has used yet."""

    def take(self, *names: str, is_needed: bool = True) -> Any:
        """Remove and return the tensor with one of the names, or None if the tensor is optional and missing."""
        for name in names:
            if f".{name}" in self:
                return self.pop(f".{name}")
        if is_needed:
            raise ValueError(f"has {', '.join(self) or 'no other tensors'}, but requires {'/'.join(names)}")
        return None

    def check_empty(self) -> None:
        if self:
            raise ValueError(
                f"has the tensor {next(iter(self)).removeprefix('.')}, which the config does not describe and "
                "which may change the values of the layer; export the checkpoint without this tensor"
            )


def _positive_scalar(array: np.ndarray, what: str) -> float:
    value = array.astype(np.float32).reshape(-1)
    if value.size != 1 or not np.isfinite(value[0]) or value[0] <= 0:
        raise ValueError(f"{what} of shape {array.shape} must be a single finite number above 0")
    return float(value[0])


def _check_array(name: str, array: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype.name}{array.shape}; config requires {np.dtype(dtype).name}{shape}")


def _make_layer(
    spec: LayerSpec, shape: tuple[int, ...], elements: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None
) -> StoredLayer:
    """Return a layer of elements and scales, after checking that there is a scale per tensor, row or block."""
    if scale.dtype not in _SCALE_DTYPES:
        raise ValueError(f"weight_scale is {scale.dtype.name}, which is not a supported scale dtype")
    if scale.dtype == np.uint8:  # E8M0 as bytes
        scale = np.ascontiguousarray(scale).view(ml_dtypes.float8_e8m0fnu)
    block = spec.weight.block_size
    if block is not None:
        counts = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        if scale.shape != counts:
            raise ValueError(f"weight_scale has shape {scale.shape}, but blocks of {block} in {shape} require {counts}")
    elif scale.size in (1, shape[0]):
        counts, block = (scale.size, 1), (shape[0] // scale.size, shape[1])
    else:
        raise ValueError(f"weight_scale has shape {scale.shape}, but must have 1 element or {shape[0]}")
    scale = scale.astype(np.float32).reshape(counts)
    if not np.isfinite(scale).all():
        raise ValueError("weight_scale has values that are not finite; export the checkpoint again")
    if zero_point is not None and zero_point.size != scale.size:
        raise ValueError(f"weight_zero_point has shape {zero_point.shape}, but the scales have {counts}")
    return StoredLayer(elements, scale, block, None if zero_point is None else zero_point.reshape(counts))


def _take_zero_point(spec: LayerSpec, unused: _UnusedTensors, bits: int, rows: int) -> np.ndarray | None:
    """Remove and return the zero points, which are int8 or packed into int32 along the rows (not the columns)."""
    zero_point = unused.take("weight_zero_point", is_needed=not spec.weight.symmetric)
    if zero_point is None:
        return None
    if zero_point.dtype == np.int32 and zero_point.ndim == 2 and len(zero_point) == -(-rows * bits // 32):
        zero_point = unpack_int(zero_point.T, bits, rows).T
    if zero_point.dtype != np.int8:
        raise ValueError(
            f"weight_zero_point is {zero_point.dtype.name}{zero_point.shape}, but must be int8 or packed into int32"
        )
    if spec.weight.symmetric and zero_point.any():
        raise ValueError("weight_zero_point is not 0, but the config has symmetric true; correct one of them")
    return None if spec.weight.symmetric else zero_point


def _read_plain(spec: LayerSpec, shape: tuple[int, ...], unused: _UnusedTensors) -> StoredLayer:
    weight = unused.take("weight")
    kind = "int8" if spec.weight.dtype == "int4" else spec.weight.dtype
    _check_array("weight", weight, jnp.dtype(kind), shape)
    scale = unused.take("weight_scale", "weight_scale_inv")
    return _make_layer(spec, shape, weight, scale, _take_zero_point(spec, unused, 8, shape[0]))


def _write_plain(spec: LayerSpec, source: Source, module: str, weight: np.ndarray, own: _Own) -> Tensors:
    elements, scale = _encode(spec, source, module, weight, own)
    return {".weight": elements, ".weight_scale" if spec.weight.block_size is None else ".weight_scale_inv": scale}


def _encode(
    spec: LayerSpec, source: Source, module: str, weight: np.ndarray, own: _Own, scale_dtype: Any = np.float32
) -> tuple[Any, Any]:
    """Return elements and scales that map the amax of the tensor, row or block to the largest element value.

    A layer that is already in the format keeps its elements and scales. Scales keep their dtype if ``scale_dtype``
    would round them, and in a traced program.
    """
    if own is not None:
        short = shorten(own.scale, scale_dtype)
        # The dtype of a traced array cannot depend on its values.
        is_exact = is_true((short.astype(np.float32) == own.scale).all(), if_traced=False)
        return own.elements, short if is_exact else own.scale
    dtype, block = spec.weight.dtype, spec.weight.block_size or (1, weight.shape[1])
    if spec.weight.is_tensor:
        scale = scale_of(source.fused_amax(module), element(dtype).max)
        return encode_scaled(weight, scale, dtype=dtype), scale
    return encode_scaled_blocks(weight, dtype=dtype, block=block, scale_dtype=scale_dtype)


def _read_packed(spec: LayerSpec, shape: tuple[int, ...], unused: _UnusedTensors) -> StoredLayer:
    bits = {"int4": 4, "int8": 8}.get(spec.weight.dtype)
    if bits is None:
        raise NotImplementedError(f"{spec.weight.dtype} cannot be packed into int32; choose another format")
    packed, scale = unused.take("weight_packed"), unused.take("weight_scale")
    _check_array("weight_packed", packed, np.int32, (shape[0], -(-shape[1] * bits // 32)))
    stored = unused.take("weight_shape", is_needed=False)
    if stored is not None and tuple(stored.tolist()) != shape:
        raise ValueError(f"weight_shape is {stored.tolist()}, but the model requires {list(shape)}")
    elements = unpack_int(packed, bits, shape[1])
    return _make_layer(spec, shape, elements, scale, _take_zero_point(spec, unused, bits, shape[0]))


def _write_packed(spec: LayerSpec, source: Source, module: str, weight: np.ndarray, own: _Own) -> Tensors:
    elements, scale = _encode(spec, source, module, weight, own, ml_dtypes.bfloat16)
    shape = np.array(weight.shape, np.int64)
    return {".weight_packed": pack_int4(elements), ".weight_scale": scale, ".weight_shape": shape}


def _read_nvfp4(spec: LayerSpec, shape: tuple[int, ...], unused: _UnusedTensors) -> StoredLayer:
    is_modelopt = spec.packing == "modelopt"
    name = "weight" if is_modelopt else "weight_packed"
    packed, scale = unused.take(name), unused.take("weight_scale")
    outer = unused.take("weight_scale_2" if is_modelopt else "weight_global_scale")
    _check_array(name, packed, np.uint8, (shape[0], shape[1] // 2))
    _check_array("weight_scale", scale, ml_dtypes.float8_e4m3fn, (shape[0], shape[1] // 16))
    value = np.full(1, _positive_scalar(outer, "the scale of the tensor"), np.float32)
    whole = scale.astype(np.float32) * value if is_modelopt else scale.astype(np.float32) / value
    levels = scale, value if is_modelopt else 1 / value
    return dataclasses.replace(_make_layer(spec, shape, unpack_e2m1(packed), whole, None), levels=levels)


def _write_nvfp4(spec: LayerSpec, source: Source, module: str, weight: np.ndarray, own: _Own) -> Tensors:
    is_modelopt = spec.packing == "modelopt"
    if own is not None:
        packed, scale, outer = pack_e2m1(own.elements), own.scale, own.outer
    else:
        outer = scale_of(source.fused_amax(module), NVFP4_RANGE)
        # If the reciprocal is stored, encode with the scale that a reader will compute from the reciprocal.
        outer = outer if is_modelopt else reciprocal(reciprocal(outer))
        packed, scale = encode_nvfp4(weight, outer)
    if is_modelopt:
        return {".weight": packed, ".weight_scale": scale, ".weight_scale_2": outer}
    return {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": reciprocal(outer)}


def _read_mxfp4(spec: LayerSpec, shape: tuple[int, ...], unused: _UnusedTensors) -> StoredLayer:
    packed, scale = unused.take("weight_packed"), unused.take("weight_scale")
    _check_array("weight_packed", packed, np.uint8, (shape[0], shape[1] // 2))
    if scale.dtype not in (np.uint8, ml_dtypes.float8_e8m0fnu):
        raise ValueError(f"weight_scale has dtype {scale.dtype.name}, but scales of MXFP4 must be E8M0")
    return _make_layer(spec, shape, unpack_e2m1(packed), scale, None)


def _write_mxfp4(spec: LayerSpec, source: Source, module: str, weight: np.ndarray, own: _Own) -> Tensors:
    if own is not None:
        return {".weight_packed": pack_e2m1(own.elements), ".weight_scale": own.scale.view(np.uint8)}
    packed, scale = encode_mxfp4(weight)
    return {".weight_packed": packed, ".weight_scale": scale}


class _Packing(NamedTuple):
    read: Callable[[LayerSpec, tuple[int, ...], _UnusedTensors], StoredLayer]
    write: Callable[[LayerSpec, Source, str, np.ndarray, _Own], Tensors]


_PACKINGS = {
    "plain": _Packing(_read_plain, _write_plain),
    "pack-quantized": _Packing(_read_packed, _write_packed),
    "nvfp4-pack": _Packing(_read_nvfp4, _write_nvfp4),
    "modelopt": _Packing(_read_nvfp4, _write_nvfp4),
    "mxfp4-pack": _Packing(_read_mxfp4, _write_mxfp4),
    "gpt-oss": _Packing(_read_mxfp4, _write_mxfp4),
}
"""Reader and writer of each packing."""
