"""Functional key/value cache, float or quantized: a pytree that functions take and return.

The key and value of a token are quantized once, when they are written, with scales from their own absmax: ``dkv`` uses
one scale per head of a position, ``heads_and_dkv`` one scale for all heads of a position. The cache contents therefore
do not depend on the number of tokens written at once. Integers are clipped to ±qmax (the bound of absmax is qmax +
0.5), and a row of zeros has scale 1. Four-bit elements are packed in pairs along head_dim. ``digits`` stores the digits
that ``jaxquant.exact.attend`` multiplies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxquant import exact
from jaxquant.config.quant_config import KV_ELEMENTS, KVCacheName, QuantConfig
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.typed import either
from jaxquant.formats.packing import PACKED_DTYPES, pack, unpack

KVQuantDtype = Literal["", "digits"] | KVCacheName
DIGITS: Final = "digits"
"""``kv_quant_dtype`` of a cache that holds the two int8 digits of each number, high digits first along head_dim."""
KVQuantAxis = Literal["dkv", "heads_and_dkv"]

SHARED_AXES: Final = {"dkv": (3,), "heads_and_dkv": (2, 3)}
"""Axes of [B, S, H, D] that share a scale, for each ``kv_quant_axis``."""


class _Format(NamedTuple):
    """A storage format of keys and values.

    Attributes:
      encode: function that returns the stored elements and scales (None for float) of an array [B, S, H, D], for the
        axes that share a scale.
      decode: function that returns the values of stored elements and scales, for a head_dim D and a dtype.
    """

    encode: Callable[[jax.Array, tuple[int, ...]], tuple[jax.Array, jax.Array | None]]
    decode: Callable[[Any, Any, int, str], Any]


def _make_format(element: str) -> _Format:
    """Return the format of an element type: absmax over the axes that share a scale; four-bit elements are packed."""
    spec, is_packed = TensorSpec(element), element in PACKED_DTYPES

    def encode(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        tensor = quantize(x, spec, axes)
        return pack(tensor.qvalue) if is_packed else tensor.qvalue, tensor.scale

    def decode(stored: jax.Array, scale: jax.Array, head_dim: int, dtype: str) -> jax.Array:
        return dequantize(QTensor(unpack(stored, element, head_dim) if is_packed else stored, scale), dtype)

    return _Format(encode, decode)


def _encode_digits(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    digits = exact.split(x, -1)
    return jnp.concatenate([digits.high, digits.low], axis=-1), digits.unit


_FORMATS: Final[dict[str, _Format]] = {
    "": _Format(lambda x, axes: (x, None), lambda stored, scale, head_dim, dtype: stored.astype(dtype)),
    **{name: _make_format(element) for name, element in KV_ELEMENTS.items()},
    DIGITS: _Format(
        _encode_digits,
        lambda stored, unit, head_dim, dtype: exact.Digits(stored[..., :head_dim], stored[..., head_dim:], unit),
    ),
}
"""Format of each ``kv_quant_dtype``; "" stores floats."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of B rows with T slots each. Slot t of a row holds the token at position t.

    The row axis comes first, so that a row can be sliced, replaced and mapped over. The layer axis follows; layers are
    updated in place, also in a loop over layers.

    Attributes:
      key, value: arrays [B, (layers,) T, H, D]; four-bit elements are bytes, with D halved and rounded up.
      key_scale, value_scale: float32 scales with size 1 along shared axes, or None if the cache is not quantized.
      head_dim: size D.
      kv_quant_dtype, kv_quant_axis: options of ``QuantConfig``; with dtype "" the cache is not quantized, and
        ``digits`` has a unit for each head with both axes.
    """

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    head_dim: int = dataclasses.field(metadata={"static": True})
    kv_quant_dtype: KVQuantDtype = dataclasses.field(metadata={"static": True})
    kv_quant_axis: KVQuantAxis = dataclasses.field(metadata={"static": True})

    @property
    def length(self) -> int:
        """Number of slots of a row."""
        return self.key.shape[-3]

    @property
    def layers(self) -> int | None:
        """Number of layers, or None if the cache has no layer axis."""
        return self.key.shape[1] if self.key.ndim == 5 else None


def empty(
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    *,
    layers: int | None = None,
    dtype: str = "float32",
    kv_quant_dtype: KVQuantDtype = "",
    kv_quant_axis: KVQuantAxis = "heads_and_dkv",
) -> KVCache:
    """Create an empty cache.

    Args:
      batch, length: number of rows, and of slots per row.
      heads, head_dim: number and size of the heads of keys and values.
      layers: size of the layer axis, or None for no layer axis.
      dtype: dtype of keys and values if ``kv_quant_dtype`` is "".
      kv_quant_dtype, kv_quant_axis: quantization, see ``QuantConfig``.

    Raises:
      ValueError: the quantization is unknown, or a size is below 1.
    """
    if kv_quant_dtype not in _FORMATS:
        known = either(filter(None, _FORMATS))
        raise ValueError(f"kv_quant_dtype {kv_quant_dtype!r} is not known; use {known}, or '' for float")
    if kv_quant_axis not in SHARED_AXES:
        raise ValueError(f"kv_quant_axis {kv_quant_axis!r} is not known; use {either(SHARED_AXES)}")
    sizes = {"batch": batch, "length": length, "heads": heads, "head_dim": head_dim, "layers": layers}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} of a KV cache must be at least 1, got {size}")
    token = jax.ShapeDtypeStruct((batch, length, heads, head_dim), dtype)
    stored, scale = jax.eval_shape(lambda x: _FORMATS[kv_quant_dtype].encode(x, SHARED_AXES[kv_quant_axis]), token)
    lead = (batch,) if layers is None else (batch, layers)
    fill = lambda part, value: jax.tree.map(lambda x: jnp.full((*lead, *x.shape[1:]), value, x.dtype), part)  # noqa: E731
    # Keys and values need separate buffers, because a donated cache can donate a buffer only once.
    arrays = fill(stored, 0), fill(stored, 0), fill(scale, 1), fill(scale, 1)
    return KVCache(*arrays, head_dim, kv_quant_dtype, kv_quant_axis)


def quantization_of(config: QuantConfig) -> dict[str, Any]:
    """Return the arguments ``kv_quant_dtype`` and ``kv_quant_axis`` of ``empty`` for a config."""
    if not config.quantize_kvcache:
        return {"kv_quant_dtype": ""}
    return {"kv_quant_dtype": config.kv_quant_dtype, "kv_quant_axis": config.kv_quant_axis}


def append(
    cache: KVCache,
    key: jax.Array,
    value: jax.Array,
    positions: int | jax.Array,
    *,
    valid: jax.Array | None = None,
    layer: int | jax.Array | None = None,
) -> KVCache:
    """Write keys and values of S tokens per row: a whole prompt, a chunk of it, or one token of a decoding step.

    Args:
      cache: cache to write to.
      key, value: arrays [B, S, H, D], any float dtype.
      positions: positions [B, S] of the tokens, or first positions [B] of the rows, or one first position for all rows.
      valid: mask [B, S], which is False for padding; padding is not written. None writes all tokens.
      layer: index of the layer if the cache has layers; may be traced.

    Returns:
      The updated cache.

    Raises:
      ValueError: a shape does not match the cache, or a concrete position is outside of the cache. Traced positions
        outside of the cache are not written, and the caller must check them.
    """
    _check_layer(cache, layer)
    rows, length, heads = cache.key.shape[0], cache.length, cache.key.shape[-2]
    expected = (rows, key.shape[1] if key.ndim == 4 else 0, heads, cache.head_dim)
    if key.shape != expected or value.shape != expected:
        raise ValueError(
            f"key and value must have shape ({rows}, tokens, {heads}, {cache.head_dim}) for this KV cache, got "
            f"{key.shape} and {value.shape}"
        )
    if valid is None and key.shape[1] > length:
        raise ValueError(f"{key.shape[1]} tokens do not fit in a KV cache of length {length}; create a longer cache")
    places = _expand_positions(positions, rows, key.shape[1])
    _check_positions(places, valid, length)
    places = jnp.asarray(places)
    if valid is not None:
        places = jnp.where(valid, places, length)
    # Negative indices count from the end in JAX, so they are moved past the end, where mode="drop" ignores them.
    places = jnp.where(places < 0, length, places)
    row = jnp.arange(rows)[:, None]
    where = (row, places) if layer is None else (row, layer, places)
    new = {}
    for name, x in (("key", key), ("value", value)):
        stored, scale = _FORMATS[cache.kv_quant_dtype].encode(x, SHARED_AXES[cache.kv_quant_axis])
        held = getattr(cache, name)
        new[name] = held.at[where].set(stored.astype(held.dtype), mode="drop")
        if scale is not None:
            new[f"{name}_scale"] = getattr(cache, f"{name}_scale").at[where].set(scale, mode="drop")
    return dataclasses.replace(cache, **new)


def read(cache: KVCache, dtype: str, *, layer: int | jax.Array | None = None) -> tuple[Any, Any]:
    """Return all keys and values, [B, T, H, D], dequantized in float32 and rounded once to ``dtype``.

    A cache of digits returns ``jaxquant.exact.Digits`` instead.

    Args:
      cache: cache to read.
      dtype: dtype of the result.
      layer: index of the layer if the cache has layers; may be traced.
    """
    _check_layer(cache, layer)
    at = (lambda x: x) if layer is None else (lambda x: jax.lax.dynamic_index_in_dim(x, layer, 1, keepdims=False))

    def decode(stored: jax.Array, scale: jax.Array | None) -> Any:
        scale = None if scale is None else at(scale)
        return _FORMATS[cache.kv_quant_dtype].decode(at(stored), scale, cache.head_dim, dtype)

    return decode(cache.key, cache.key_scale), decode(cache.value, cache.value_scale)


def nbytes(cache: KVCache) -> int:
    """Return the size of a cache in bytes, including its scales."""
    return sum(math.ceil(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) / 8) for leaf in jax.tree.leaves(cache))


def _expand_positions(positions: int | jax.Array, rows: int, tokens: int) -> Any:
    """Return [B, S] positions; a numpy array if the positions are concrete."""
    known: Any = positions if isinstance(positions, Tracer) else np.asarray(positions)
    if known.ndim == 2:
        if known.shape != (rows, tokens):
            raise ValueError(f"positions must have shape (rows, tokens), {(rows, tokens)}, got {known.shape}")
        return known
    if known.ndim == 1 and known.shape != (rows,):
        raise ValueError(f"positions must have one entry for each of the {rows} rows, got shape {known.shape}")
    first = known[:, None] if known.ndim == 1 else known
    steps = np.arange(tokens)[None]
    return (first + steps) + np.zeros((rows, 1), np.int32)


def _check_positions(places: Any, valid: jax.Array | None, length: int) -> None:
    """Raise if a concrete position is outside of the cache; padding is not checked."""
    if isinstance(places, Tracer) or isinstance(valid, Tracer):
        return
    used = places if valid is None else places[np.asarray(valid)]
    outside = used[(used < 0) | (used >= length)]
    if outside.size:
        raise ValueError(
            f"position {outside.flat[0]} is outside of a KV cache of length {length}; create a longer cache, or stop "
            "generating earlier"
        )


def _check_layer(cache: KVCache, layer: int | jax.Array | None) -> None:
    if (cache.layers is None) != (layer is None):
        has = "no layers" if cache.layers is None else f"{cache.layers} layers"
        raise ValueError(
            f"a KV cache with {has} got layer {layer!r}; pass a number if the cache has layers, otherwise None"
        )
    if cache.layers is not None and isinstance(layer, int) and not 0 <= layer < cache.layers:
        raise ValueError(f"layer of this KV cache must be from 0 to {cache.layers - 1}, got {layer}")
