"""A key/value cache, plain or quantized: it goes into a function and comes out of it, and nothing holds it between.

A token's key and value are quantized once, when they are written, by their own absmax: ``dkv`` gives every head of a
position a scale, ``heads_and_dkv`` the heads of a position one together. So what the cache holds does not depend on how
many tokens were written at once. Integers are clipped to ±qmax (the bound of absmax is qmax + 0.5), and a row of zeros
has scale 1. Elements of four bits lie packed, two to a byte along head_dim.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxquant.config.quant_config import KV_ELEMENTS, KVCacheName, QuantConfig
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.typed import either
from jaxquant.formats.packing import PACKED_DTYPES, pack, unpack

KVQuantDtype = Literal[""] | KVCacheName
KVQuantAxis = Literal["dkv", "heads_and_dkv"]

SPECS: Final = {name: TensorSpec(element) for name, element in KV_ELEMENTS.items()}
"""What each ``kv_quant_dtype`` means: absmax along the axes of ``SHARED_AXES``."""

SHARED_AXES: Final = {"dkv": (3,), "heads_and_dkv": (2, 3)}
"""The axes of [B, S, H, D] along which each ``kv_quant_axis`` shares a scale."""

PACKED: Final[dict[str, str]] = {name: element for name, element in KV_ELEMENTS.items() if element in PACKED_DTYPES}
"""The element of each ``kv_quant_dtype`` of four bits, which lies packed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of B rows, each with T places. Place t of a row holds its token at position t.

    Rows come first, so that one row can be cut out, put in, and mapped over; the layers of a model lie behind them and
    are written in place one after the other, in a loop over layers too.

    Attributes:
      key, value: [B, (layers,) T, H, D]; four bits in bytes, with D halved and rounded up.
      key_scale, value_scale: float32, 1 for each shared axis; None where the cache is not quantized.
      head_dim: D.
      kv_quant_dtype, kv_quant_axis: as in ``QuantConfig``; "" is not quantized.
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
        """Places of a row."""
        return self.key.shape[-3]

    @property
    def layers(self) -> int | None:
        """Layers; None for a cache of one layer without that axis."""
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
    """Make a cache that holds nothing yet.

    Args:
      batch, length: rows and the places of each.
      heads, head_dim: of keys and values.
      layers: adds an axis of that size; None leaves it out.
      dtype: of what is held where ``kv_quant_dtype`` is "".
      kv_quant_dtype, kv_quant_axis: the quantization.

    Raises:
      ValueError: an unknown quantization, or a size below 1.
    """
    if kv_quant_dtype and kv_quant_dtype not in SPECS:
        raise ValueError(f"kv_quant_dtype {kv_quant_dtype!r} is not known; use '' for none, {either(SPECS)}")
    if kv_quant_axis not in SHARED_AXES:
        raise ValueError(f"kv_quant_axis {kv_quant_axis!r} is not known; use {either(SHARED_AXES)}")
    sizes = {"batch": batch, "length": length, "heads": heads, "head_dim": head_dim, "layers": layers}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} {size} of a KV cache must be at least 1")
    lead = (batch,) if layers is None else (batch, layers)
    width = -(-head_dim // 2) if kv_quant_dtype in PACKED else head_dim
    held = jnp.zeros((*lead, length, heads, width), _held_dtype(kv_quant_dtype, dtype))
    scale = None
    if kv_quant_dtype:
        shared = SHARED_AXES[kv_quant_axis]
        scale = jnp.ones((*lead, length, 1 if 2 in shared else heads, 1), jnp.float32)
    # Keys and values in buffers of their own: a cache is donated, and a buffer can be given away once.
    scale_too = None if scale is None else scale.copy()
    return KVCache(held, held.copy(), scale, scale_too, head_dim, kv_quant_dtype, kv_quant_axis)


def quantization_of(config: QuantConfig) -> dict[str, Any]:
    """Return what ``empty`` takes of a config: ``kv_quant_dtype`` and ``kv_quant_axis``, if ``quantize_kvcache``."""
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
    """Write keys and values of S tokens a row: a whole prompt, a chunk of it, or the one token of a decoding step.

    Args:
      cache: the cache.
      key, value: [B, S, H, D], any float dtype.
      positions: of the tokens, [B, S]; or of the first of them, one for all rows or [B].
      valid: [B, S], False for padding, which is not written; None writes all.
      layer: which layer of a cache that has layers; may be traced.

    Returns:
      The cache with the tokens in place.

    Raises:
      ValueError: shapes that do not fit the cache, or a position outside of it, where positions are known while
        tracing. Of others nothing is written; the caller checks them where they are made.
    """
    _check_layer(cache, layer)
    rows, length, heads = cache.key.shape[0], cache.length, cache.key.shape[-2]
    expected = (rows, key.shape[1] if key.ndim == 4 else 0, heads, cache.head_dim)
    if key.shape != expected or value.shape != expected:
        raise ValueError(
            f"key of shape {key.shape} and value of shape {value.shape} do not fit a KV cache of {rows} rows, {heads} "
            f"heads and head_dim {cache.head_dim}; both must be [batch, tokens, heads, head_dim]"
        )
    if valid is None and key.shape[1] > length:
        raise ValueError(f"{key.shape[1]} tokens do not fit a KV cache of length {length}; make a longer one")
    places = _places(positions, rows, key.shape[1])
    _check_places(places, valid, length)
    places = jnp.asarray(places)
    if valid is not None:
        places = jnp.where(valid, places, length)
    # An index below 0 counts from the end in JAX; beyond the end nothing is written.
    places = jnp.where(places < 0, length, places)
    row = jnp.arange(rows)[:, None]
    where = (row, places) if layer is None else (row, layer, places)
    new = {}
    for name, x in (("key", key), ("value", value)):
        held, scale = _encode(cache, x)
        new[name] = getattr(cache, name).at[where].set(held, mode="drop")
        if scale is not None:
            new[f"{name}_scale"] = getattr(cache, f"{name}_scale").at[where].set(scale, mode="drop")
    return dataclasses.replace(cache, **new)


def read(cache: KVCache, dtype: str, *, layer: int | jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Read all keys and values, [B, T, H, D], dequantized in float32 and rounded once to ``dtype``.

    Args:
      cache: the cache.
      dtype: of the result.
      layer: which layer of a cache that has layers; may be traced.
    """
    _check_layer(cache, layer)
    at = (lambda x: x) if layer is None else (lambda x: jax.lax.dynamic_index_in_dim(x, layer, 1, keepdims=False))

    def decode(held: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return at(held).astype(dtype)
        held = at(held)
        if cache.kv_quant_dtype in PACKED:
            held = unpack(held, PACKED[cache.kv_quant_dtype], cache.head_dim)
        return dequantize(QTensor(held, at(scale)), dtype)

    return decode(cache.key, cache.key_scale), decode(cache.value, cache.value_scale)


def nbytes(cache: KVCache) -> int:
    """Count the bytes that a cache takes, scales included."""
    return sum(math.ceil(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) / 8) for leaf in jax.tree.leaves(cache))


def _held_dtype(kv_quant_dtype: KVQuantDtype, dtype: str) -> str:
    if not kv_quant_dtype:
        return dtype
    return "uint8" if kv_quant_dtype in PACKED else SPECS[kv_quant_dtype].dtype


def _encode(cache: KVCache, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    if not cache.kv_quant_dtype:
        return x.astype(cache.key.dtype), None
    tensor = quantize(x, SPECS[cache.kv_quant_dtype], SHARED_AXES[cache.kv_quant_axis])
    return pack(tensor.qvalue) if cache.kv_quant_dtype in PACKED else tensor.qvalue, tensor.scale


def _places(positions: int | jax.Array, rows: int, tokens: int) -> Any:
    """Return [B, S] positions; of what is known while tracing a numpy array."""
    known: Any = positions if isinstance(positions, Tracer) else np.asarray(positions)
    if known.ndim == 2:
        if known.shape != (rows, tokens):
            raise ValueError(f"positions of shape {known.shape} do not fit {rows} rows of {tokens} tokens")
        return known
    if known.ndim == 1 and known.shape != (rows,):
        raise ValueError(f"positions of shape {known.shape} do not fit {rows} rows; give one first position a row")
    first = known[:, None] if known.ndim == 1 else known
    steps = np.arange(tokens)[None]
    return (first + steps) + np.zeros((rows, 1), np.int32)


def _check_places(places: Any, valid: jax.Array | None, length: int) -> None:
    """Refuse a position outside of the cache, where positions are known; a tail of padding may lie there."""
    if isinstance(places, Tracer) or isinstance(valid, Tracer):
        return
    used = places if valid is None else places[np.asarray(valid)]
    outside = used[(used < 0) | (used >= length)]
    if outside.size:
        raise ValueError(
            f"position {outside.flat[0]} lies outside of a KV cache of length {length}; make a longer cache or stop "
            "before its end"
        )


def _check_layer(cache: KVCache, layer: int | jax.Array | None) -> None:
    if (cache.layers is None) != (layer is None):
        has = "no layers" if cache.layers is None else f"{cache.layers} layers"
        raise ValueError(f"layer {layer!r} does not fit a KV cache with {has}; name a layer of a cache that has them")
    if cache.layers is not None and isinstance(layer, int) and not 0 <= layer < cache.layers:
        raise ValueError(f"layer {layer} is not one of the {cache.layers} of the KV cache")
