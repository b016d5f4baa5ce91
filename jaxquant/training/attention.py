"""Causal attention by XLA, by cuDNN's kernel on NVIDIA GPUs, or by the splash attention kernel on TPUs.

All three compute grouped-query attention and keep packed documents separate. XLA stores the attention scores of all
token pairs; the two kernels do not. Each kind encodes the documents differently (``make_mask``): XLA as a mask over
pairs of tokens, cuDNN as a bias over pairs, splash as segment ids.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array
Kind = Literal["xla", "cudnn", "splash"]
PLATFORMS: dict[str, tuple[str, ...]] = {"cudnn": ("gpu", "cuda"), "splash": ("tpu",)}
"""Platforms of each kernel, by their jax names."""

_MASKED = -(2.0**41)  # as in jax's cuDNN attention; the difference of two larger biases overflows
_LANES = 128  # lanes of a TPU vector register; splash attention requires a multiple
_BLOCKS = (512, 256, 128)  # queries and keys per splash program; the largest divisor of the length is used


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Apply rotary position embedding to an array [batch, sequence, heads, head_dim].

    The two halves of the last axis are rotated as pairs. Angles are computed in float32.
    """
    half = x.shape[-1] // 2
    wavelength = theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) / wavelength
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def _unsupported_reason(kind: str, platform: str, head_dim: int, length: int, dtype: str) -> str:
    """Return the reason why a kernel does not run on a platform or with these shapes, or ""."""
    if platform not in PLATFORMS[kind]:
        return f"runs on {' or '.join(PLATFORMS[kind])}, but the devices are {platform}"
    if kind == "cudnn" and dtype != "bfloat16":
        return f"requires bfloat16, but dtype is {dtype}"
    if kind == "cudnn" and (head_dim % 8 or head_dim > 128):
        return f"requires a head_dim that is a multiple of 8 up to 128, got {head_dim}"
    if kind == "splash" and head_dim % _LANES:
        return f"requires a head_dim that is a multiple of {_LANES}, got {head_dim}"
    if kind == "splash" and length % _BLOCKS[-1]:
        return f"requires a sequence_length that is a multiple of {_BLOCKS[-1]}, got {length}"
    return ""


def choose_attention(requested: str, platform: str, head_dim: int, length: int, dtype: str) -> Kind:
    """Choose the attention implementation.

    Args:
      requested: requested implementation: "auto", "xla", "cudnn" or "splash".
      platform: platform of the devices, as jax names it.
      head_dim, length, dtype: head size, sequence length and dtype of the model.

    Raises:
      ValueError: the requested kernel does not run on the platform or with these shapes.
    """
    reasons = {kind: _unsupported_reason(kind, platform, head_dim, length, dtype) for kind in PLATFORMS}
    if requested == "auto":
        requested = next((kind for kind, reason in reasons.items() if not reason), "xla")
    elif reasons.get(requested):
        raise ValueError(f"attention {requested!r} {reasons[requested]}; use 'auto' or 'xla'")
    return requested  # type: ignore[return-value]


def make_mask(kind: Kind, tokens: Array, segment_ids: Array | None) -> Array | None:
    """Return the mask argument of ``attend``, computed once for all layers.

    Args:
      kind: attention implementation.
      tokens: array [batch, sequence].
      segment_ids: document ids of the tokens, or None if each row is one document.
    """
    length = tokens.shape[1]
    if kind == "splash":
        return jnp.zeros(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    if kind == "cudnn" and segment_ids is None:
        return None
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
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
      interpret: whether to run a splash kernel in the interpreter, without a TPU.
    """
    if kind == "cudnn":
        # The bias encodes the documents; is_causal lets the kernel skip half of the work.
        return jax.nn.dot_product_attention(query, key, value, visible, is_causal=True, implementation="cudnn")
    assert visible is not None
    if kind == "xla":
        return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation="xla")
    local = functools.partial(_splash, interpret=interpret)
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


def _splash(query: Array, key: Array, value: Array, segment_ids: Array, interpret: bool) -> Array:
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
    query, key, value = (x.swapaxes(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value))
    segments = splash_attention_kernel.SegmentIds(segment_ids, segment_ids)
    mixed: Any = jax.vmap(kernel)(query, key, value, segments)
    return mixed.swapaxes(1, 2).astype(value.dtype)
