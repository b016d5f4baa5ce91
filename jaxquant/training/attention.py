"""Causal attention by XLA, by cuDNN's kernel on NVIDIA GPUs, or by the splash attention kernel on TPUs.

All three compute grouped-query attention and keep packed documents separate. XLA stores the attention scores of all
token pairs; the two kernels do not. Each kind encodes the documents differently (``make_mask``): XLA as a mask over
pairs of tokens, cuDNN as a bias over pairs, splash as segment ids.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.config.decoder import DecoderShape

Array = jax.Array
Kind = Literal["xla", "cudnn", "splash"]
PLATFORMS: dict[str, tuple[str, ...]] = {"cudnn": ("gpu", "cuda"), "splash": ("tpu",)}
"""Platforms of each kernel, by their jax names."""

_MASKED = -(2.0**41)  # as in jax's cuDNN attention; the difference of two larger biases overflows
_LANES = 128  # lanes of a TPU vector register; splash attention requires a multiple
_BLOCKS = (512, 256, 128)  # queries and keys per splash program; the largest divisor of the length is used


class Rope(NamedTuple):
    """Wavelengths and magnitude of a rotary position embedding.

    Attributes:
      theta: base of the wavelengths; the wavelength of feature i of n is ``2 π theta ** (i / n)``.
      stretch: factors [head_dim / 2] that multiply the wavelengths, or None.
      magnitude: factor that multiplies the result.
    """

    theta: float | jax.Array
    stretch: Any = None
    magnitude: float = 1.0


def rotate(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Apply rotary position embedding to an array [batch, sequence, heads, head_dim].

    The two halves of the last axis are rotated as pairs. Angles are computed in float32.
    """
    half = x.shape[-1] // 2
    wavelength = rope.theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    if rope.stretch is not None:
        wavelength *= rope.stretch
    angle = positions[:, :, None, None].astype(jnp.float32) / wavelength
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if rope.magnitude != 1:
        sin, cos = sin * rope.magnitude, cos * rope.magnitude
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def _unsupported_reason(kind: str, platform: str, shape: DecoderShape, length: int, dtype: str) -> str:
    """Return the reason why a kernel does not run on a platform or for a decoder, or ""."""
    head_dim = shape.head_dim
    if platform not in PLATFORMS[kind]:
        return f"runs on {' or '.join(PLATFORMS[kind])}, but the devices are {platform}"
    for name in ("attn_logits_soft_cap", "attention_sinks", *(["sliding_window_size"] if kind == "splash" else [])):
        if getattr(shape, name):
            return f"does not support {name}"
    if kind == "cudnn" and dtype != "bfloat16":
        return f"requires bfloat16, but dtype is {dtype}"
    if kind == "cudnn" and (head_dim % 8 or head_dim > 128):
        return f"requires a head_dim that is a multiple of 8 up to 128, got {head_dim}"
    if kind == "splash" and head_dim % _LANES:
        return f"requires a head_dim that is a multiple of {_LANES}, got {head_dim}"
    if kind == "splash" and length % _BLOCKS[-1]:
        return f"requires a sequence_length that is a multiple of {_BLOCKS[-1]}, got {length}"
    return ""


def choose_attention(requested: str, platform: str, shape: DecoderShape, length: int, dtype: str) -> Kind:
    """Choose the attention implementation.

    Args:
      requested: requested implementation: "auto", "xla", "cudnn" or "splash".
      platform: platform of the devices, as jax names it.
      shape: shape of the decoder.
      length, dtype: sequence length and dtype of the model.

    Raises:
      ValueError: the requested kernel does not run on the platform or for this decoder.
    """
    reasons = {kind: _unsupported_reason(kind, platform, shape, length, dtype) for kind in PLATFORMS}
    if requested == "auto":
        requested = next((kind for kind, reason in reasons.items() if not reason), "xla")
    elif reasons.get(requested):
        raise ValueError(f"attention {requested!r} {reasons[requested]}; use 'auto' or 'xla'")
    return requested  # type: ignore[return-value]


def make_mask(kind: Kind, tokens: Array, segment_ids: Array | None, window: int = 0) -> Array | None:
    """Return the mask argument of ``attend``, computed once for all layers.

    Args:
      kind: attention implementation.
      tokens: array [batch, sequence].
      segment_ids: document ids of the tokens, or None if each row is one document.
      window: number of positions that a token attends to, including its own; 0 means all earlier positions.
    """
    length = tokens.shape[1]
    if kind == "splash":
        return jnp.zeros(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    if kind == "cudnn" and segment_ids is None and not window:
        return None
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    if window:
        mask = mask & jnp.triu(jnp.ones((length, length), bool), 1 - window)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return jnp.where(mask, 0, jnp.bfloat16(_MASKED)) if kind == "cudnn" else mask


def attend(
    query: Array,
    key: Array,
    value: Array,
    visible: Array | None,
    kind: Kind = "xla",
    sharding: Any = None,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Return the causal attention of queries over keys and values.

    Args:
      query: array [batch, sequence, query heads, head_dim].
      key, value: arrays [batch, key positions, key heads, head_dim].
      visible: result of ``make_mask``. XLA accepts any mask [batch or 1, 1, sequence, key positions]. For cuDNN,
        ``visible`` is None if each row is one document.
      kind: attention implementation.
      sharding: sharding of the model's activations, or None on one device. A splash kernel runs on each device's shard.
      scale: factor of the scores; None means ``head_dim ** -0.5``.
      soft_cap: bound of the scores, ``soft_cap · tanh(score / soft_cap)``; 0 means no bound. Only for XLA.
      sinks: score [query heads] of a key without a value in each head, or None. Only for XLA.
      interpret: whether to run a splash kernel in the interpreter, without a TPU.
    """
    if kind == "cudnn":
        # The bias encodes documents and windows; is_causal lets the kernel skip half of the work.
        options: Any = {"is_causal": True, "implementation": "cudnn", "scale": scale}
        return jax.nn.dot_product_attention(query, key, value, visible, **options)
    assert visible is not None
    if kind == "xla" and (soft_cap or sinks is not None):
        return _attend_capped(query, key, value, visible, scale, soft_cap, sinks)
    if kind == "xla":
        return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation="xla", scale=scale)
    local = functools.partial(_splash, scale=scale, interpret=interpret)
    if not isinstance(sharding, NamedSharding):
        return local(query, key, value, visible)
    rows = sharding.spec[0]
    names = sharding.mesh.axis_names
    parts = sharding.mesh.shape["tensor"] if "tensor" in names else 1
    heads = "tensor" if parts > 1 and key.shape[2] % parts == 0 else None
    data = PartitionSpec(rows, None, heads, None)
    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(data, data, data, PartitionSpec(rows, None)),
        out_specs=data,
        check_vma=False,  # the kernel's results have no varying mesh axes
    )(query, key, value, visible)


def _attend_capped(
    query: Array, key: Array, value: Array, visible: Array, scale: float | None, soft_cap: float, sinks: Array | None
) -> Array:
    """Return the attention with bounded scores and sinks; the arguments are those of ``attend``."""
    batch, length, heads, size = query.shape
    groups = query.reshape(batch, length, key.shape[2], -1, size)
    scores = jnp.einsum("btkgh,bskh->bkgts", groups, key, preferred_element_type=jnp.float32)
    scores *= size**-0.5 if scale is None else scale
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, :, None], scores, _MASKED)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, key.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    share = jax.nn.softmax(scores)[..., : key.shape[1]].astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", share, value).reshape(batch, length, heads, -1)


def _splash(query: Array, key: Array, value: Array, segment_ids: Array, scale: float | None, interpret: bool) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    length, heads = query.shape[1], query.shape[2]
    block = next(size for size in _BLOCKS if length % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = splash_attention_kernel.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block))
    causal = splash_attention_mask.CausalMask((length, length))
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    query, key, value = (x.swapaxes(1, 2) for x in (query * (scale or query.shape[-1] ** -0.5), key, value))
    segments = splash_attention_kernel.SegmentIds(segment_ids, segment_ids)
    mixed: Any = jax.vmap(kernel)(query, key, value, segments)
    return mixed.swapaxes(1, 2).astype(value.dtype)
