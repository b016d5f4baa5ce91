"""Attention by whose code: XLA's own, cuDNN's kernel on NVIDIA GPUs, splash attention's on TPUs.

All compute causal grouped-query attention in which packed documents do not see each other. XLA's writes the scores of
every pair of tokens into memory; the kernels never do. What they need to know of documents differs (``visibility``):
XLA a mask of pairs, cuDNN a bias of them, splash the segment ids.
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
"""Where a kernel runs, as jax names platforms."""

_UNSEEN = -(2.0**41)  # what jax's own attention adds for cuDNN: with larger ones differences of two overflow there
_LANES = 128  # of a TPU's vector registers: splash attention takes heads of whole multiples
_BLOCKS = (512, 256, 128)  # of queries and keys that a splash program loads, the largest that divides


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Apply rotary position embedding to [batch, sequence, heads, head_dim], halves rotated, angles in float32."""
    half = x.shape[-1] // 2
    wavelength = theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) / wavelength
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def _misfit(kind: str, platform: str, head_dim: int, length: int, dtype: str) -> str:
    """Return why a kernel does not run there, or not with these shapes; "" where it does."""
    if platform not in PLATFORMS[kind]:
        return f"runs on {' or '.join(PLATFORMS[kind])}, and the devices are {platform}"
    if kind == "cudnn" and dtype != "bfloat16":
        return f"takes bfloat16, and dtype is {dtype}"
    if kind == "cudnn" and (head_dim % 8 or head_dim > 128):
        return f"takes a head_dim that is a multiple of 8 up to 128, got {head_dim}"
    if kind == "splash" and head_dim % _LANES:
        return f"takes a head_dim that is a multiple of {_LANES}, got {head_dim}"
    if kind == "splash" and length % _BLOCKS[-1]:
        return f"takes a sequence_length that is a multiple of {_BLOCKS[-1]}, got {length}"
    return ""


def choose(asked: str, platform: str, head_dim: int, length: int, dtype: str) -> Kind:
    """Choose whose attention runs.

    Args:
      asked: "auto", "xla", "cudnn" or "splash".
      platform: of the devices, as jax names it.
      head_dim, length, dtype: of the model and its sequences.

    Raises:
      ValueError: the kernel that was asked for does not run there, or not with these shapes.
    """
    why = {kind: _misfit(kind, platform, head_dim, length, dtype) for kind in PLATFORMS}
    if asked == "auto":
        asked = next((kind for kind, reason in why.items() if not reason), "xla")
    elif why.get(asked):
        raise ValueError(f"attention {asked!r} {why[asked]}; use 'auto' or 'xla'")
    return asked  # type: ignore[return-value]


def visibility(kind: Kind, tokens: Array, segment_ids: Array | None) -> Array | None:
    """Return what ``attend`` takes to know who may look at whom, made once for all layers.

    Args:
      kind: whose attention.
      tokens: [batch, sequence].
      segment_ids: documents of the tokens, None where a row is one.
    """
    length = tokens.shape[1]
    if kind == "splash":
        return jnp.zeros(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    if kind == "cudnn" and segment_ids is None:
        return None
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return jnp.where(mask, 0, jnp.bfloat16(_UNSEEN)) if kind == "cudnn" else mask


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
    """Mix values by causal attention.

    Args:
      query: [batch, sequence, query heads, head_dim].
      key, value: [batch, places, key heads, head_dim].
      visible: from ``visibility``; of XLA's any mask [batch or 1, 1, sequence, places]; of cuDNN's None where a row is
        one document.
      kind: whose attention.
      sharding: of the model's activations, None on one device. A splash kernel runs in each device's own part.
      interpret: run a splash kernel in the interpreter, where there is no TPU.
    """
    if kind == "cudnn":
        # The bias holds the documents; that it is causal lets the kernel leave out half of the work.
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
        check_vma=False,  # the kernel's results carry no mesh axes
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
