"""A Llama-style decoder in plain Linen. It knows nothing of quantization.

Module paths carry MaxText's names, so that its mixed-precision files and rules fit:
``layers/self_attention/{query,key,value,out}``, ``layers/mlp/{wi_0,wi_1,wo}``, ``token_embedder``, ``decoder_norm``,
``logits_dense``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.dtypes import promote_dtype

from jaxquant.ops.remat import save_quantized
from jaxquant.serving import kv_cache
from jaxquant.serving.kv_cache import KVCache
from train.attention import Kind, attend, visibility

HEAD_ELEMENTS = 2**27
"""Logits of one sequence that a loss holds at a time: half a gigabyte of float32."""

REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "quantized": save_quantized,
}
"""What the backward pass keeps, by the name of a ``remat_policy``; "none" keeps everything."""

EXECUTION_ORDER = (
    "token_embedder",
    "pre_self_attention_layer_norm",
    "self_attention/query",
    "self_attention/key",
    "self_attention/value",
    "self_attention/out",
    "self_attention",
    "post_self_attention_layer_norm",
    "mlp/wi_0",
    "mlp/wi_1",
    "mlp/wo",
    "mlp",
    "layers",
    "decoder_norm",
    "logits_dense",
    "logits",
)
"""Modules in the order in which their outputs are finished, for naming the first one that overflowed."""


SCANNED: Any = {
    "variable_axes": {"params": 0, "_overwrite_with_gradient": 0, "intermediates": 0},
    "split_rngs": {"params": True, "quant": True},
}
"""What ``nn.scan`` does with the layers' variables and random streams."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and numerics of the decoder; the fields mean what they mean in ``TrainConfig``."""

    vocab_size: int
    emb_dim: int
    mlp_dim: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 500000.0
    norm_epsilon: float = 1e-5
    logits_via_embedding: bool = True
    scan_layers: bool = True
    remat_policy: str = "none"
    dtype: str = "float32"
    attention: Kind = "xla"
    head_chunks: int = 0
    activation_sharding: jax.sharding.Sharding | None = None

    def dense(self, features: int | tuple[int, ...], name: str, axis: int | tuple[int, ...] = -1) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            features, axis=axis, use_bias=False, dtype=jnp.dtype(self.dtype), param_dtype=jnp.float32, name=name
        )

    def norm(self, name: str) -> nn.RMSNorm:
        dtype = jnp.dtype(self.dtype)
        return nn.RMSNorm(epsilon=self.norm_epsilon, dtype=dtype, param_dtype=jnp.float32, name=name)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Apply rotary position embedding to [batch, sequence, heads, head_dim], halves rotated, angles in float32."""
    half = x.shape[-1] // 2
    wavelength = theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) / wavelength
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


class Cached(NamedTuple):
    """A cache on its way through the layers.

    Attributes:
      cache: of all layers.
      valid: [batch, tokens], False for padding; None is no padding.
      layer: the layer that is to write and read it.
    """

    cache: KVCache
    valid: jax.Array | None
    layer: int | jax.Array

    def update(self, key: jax.Array, value: jax.Array, positions: jax.Array) -> tuple[Cached, jax.Array, jax.Array]:
        """Write keys and values, and give all that the cache reads back, in their dtype."""
        cache = kv_cache.append(self.cache, key, value, positions, valid=self.valid, layer=self.layer)
        return (self._replace(cache=cache), *kv_cache.read(cache, key.dtype.name, layer=self.layer))


def empty_cache(
    config: DecoderConfig,
    batch: int,
    length: int,
    *,
    kv_quant_dtype: kv_cache.KVQuantDtype = "",
    kv_quant_axis: kv_cache.KVQuantAxis = "heads_and_dkv",
) -> KVCache:
    """Make an empty cache for a decoder: ``length`` positions of ``batch`` texts.

    Args:
      config: the decoder's shape; its dtype is that of a cache that is not quantized.
      batch, length: rows and the places of each.
      kv_quant_dtype, kv_quant_axis: see ``jaxquant.serving.kv_cache``.
    """
    return kv_cache.empty(
        batch,
        length,
        config.num_kv_heads,
        config.head_dim,
        layers=config.num_layers,
        dtype=config.dtype,
        kv_quant_dtype=kv_quant_dtype,
        kv_quant_axis=kv_quant_axis,
    )


def masks(
    c: DecoderConfig,
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    cache: KVCache | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return who may look at whom (``visibility``), positions and, with a cache, which tokens are written to it.

    Place t of a cache holds the token at position t, and a query looks at its own place and those before it. What an
    earlier text or padding may have left lies behind.

    Raises:
      ValueError: no positions, which a cache does not know.
    """
    if cache is not None:
        if positions is None:
            raise ValueError("positions of tokens that go into a KV cache must be given; [batch, tokens], from 0")
        mask = positions[:, None, :, None] >= jnp.arange(cache.length)[None, None, None, :]
        return mask, positions, None if segment_ids is None else segment_ids != 0
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return visibility(c.attention, tokens, segment_ids), positions, None


def mix(
    c: DecoderConfig, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, cached: Cached | None
) -> jax.Array:
    """Mix values by attention: a cache's by XLA's, whose mask may be any."""
    kind = c.attention if cached is None else "xla"
    return attend(query, key, value, mask, kind, c.activation_sharding)


def head_chunks(c: DecoderConfig, length: int) -> int:
    """Return in how many pieces a sequence's logits are made, for a loss that needs no more than one at a time.

    They are the fewest that divide it into pieces of ``HEAD_ELEMENTS`` logits at most, and one where all are few.
    """
    if c.head_chunks:
        return c.head_chunks
    fits = (n for n in range(1, length + 1) if length % n == 0 and length // n * c.vocab_size <= HEAD_ELEMENTS)
    return next(fits, length)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the loss of every token, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def in_chunks(x: jax.Array, n: int) -> jax.Array:
    """Cut [batch, sequence, ...] along the sequence into [n, batch, sequence / n, ...]."""
    return x.reshape(x.shape[0], n, -1, *x.shape[2:]).swapaxes(0, 1)


def from_chunks(x: jax.Array) -> jax.Array:
    """Undo ``in_chunks``."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])


class SelfAttention(nn.Module):
    """Grouped-query attention; ``mask`` says where a query may look (``masks``)."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array, positions: jax.Array, cached: Cached | None = None
    ) -> tuple[jax.Array, Cached | None]:
        c = self.config
        query = c.dense((c.num_query_heads, c.head_dim), "query")(x)
        key = c.dense((c.num_kv_heads, c.head_dim), "key")(x)
        value = c.dense((c.num_kv_heads, c.head_dim), "value")(x)
        query, key = rotate(query, positions, c.rope_theta), rotate(key, positions, c.rope_theta)
        if cached is not None:
            cached, key, value = cached.update(key, value, positions)
        mixed = mix(c, query, key, value, mask, cached)
        return c.dense(c.emb_dim, "out", axis=(-2, -1))(mixed), cached


class Mlp(nn.Module):
    """SwiGLU: ``wo(silu(wi_0(x)) * wi_1(x))``."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        hidden = nn.silu(c.dense(c.mlp_dim, "wi_0")(x)) * c.dense(c.mlp_dim, "wi_1")(x)
        return c.dense(c.emb_dim, "wo")(hidden)


class DecoderLayer(nn.Module):
    """One pre-norm layer, shaped as the body of a scan over layers."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array, positions: jax.Array, cached: Cached | None = None
    ) -> tuple[jax.Array, Cached | None]:
        c = self.config
        attention = SelfAttention(c, name="self_attention")
        mixed, cached = attention(c.norm("pre_self_attention_layer_norm")(x), mask, positions, cached)
        x = x + mixed
        x = x + Mlp(c, name="mlp")(c.norm("post_self_attention_layer_norm")(x))
        return constrain(x, c), cached


class Decoder(nn.Module):
    """Tokens to logits (float32) or, where ``targets`` are given, to the loss of each token.

    Packed documents do not see each other: a query looks at keys before it with its own segment id.

    With a ``cache`` each row is one document. Its tokens, at ``positions``, are written to the cache, those with
    segment id 0 are not. Each looks at what the cache reads back from its own position and those before it, so that it
    does not matter in how many calls they came. The cache comes back beside the logits.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
        targets: jax.Array | None = None,
    ) -> Any:
        c = self.config
        mask, positions, valid = masks(c, tokens, segment_ids, positions, cache)
        embedder = nn.Embed(
            c.vocab_size,
            c.emb_dim,
            dtype=jnp.dtype(c.dtype),
            param_dtype=jnp.float32,
            promote_dtype=_promote_and_gather(c),
            name="token_embedder",
        )
        x = constrain(embedder(tokens), c)
        if cache is not None:
            x, cache = _run_cached_layers(c, x, mask, positions, cache, valid)
        else:
            x = _run_layers(c, x, mask, positions)
        x = c.norm("decoder_norm")(x)
        head = embedder if c.logits_via_embedding else c.dense(c.vocab_size, "logits_dense")
        if targets is not None:
            return _losses(c, head, x, targets)
        logits = _logits(head, x).astype(jnp.float32)
        return logits if cache is None else (logits, cache)


def _logits(head: nn.Module, x: jax.Array) -> jax.Array:
    return head.attend(x) if isinstance(head, nn.Embed) else head(x)  # pyright: ignore[reportCallIssue]


def _losses(c: DecoderConfig, head: nn.Module, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Return each token's loss, from logits that are made piece by piece, again in the backward pass."""
    n = head_chunks(c, x.shape[1])
    if n == 1:
        return cross_entropy(_logits(head, x), targets)

    def piece(head: nn.Module, carry: None, item: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return carry, cross_entropy(_logits(head, item[0]), item[1])

    shared = ["params", "_overwrite_with_gradient", "intermediates"]
    scan = nn.scan(
        nn.remat(piece, prevent_cse=False), variable_broadcast=shared, split_rngs={"params": False, "quant": True}
    )
    return from_chunks(scan(head, None, (in_chunks(x, n), in_chunks(targets, n)))[1])


def constrain(x: jax.Array, config: DecoderConfig) -> jax.Array:
    """Place an activation on the mesh."""
    if config.activation_sharding is None:
        return x
    return jax.lax.with_sharding_constraint(x, config.activation_sharding)


def _promote_and_gather(config: DecoderConfig) -> Any:
    """Cast as flax does, and gather a sharded table before tokens are looked up in it.

    Left to itself the partitioner looks up in every part and cannot bring the result into the batch's sharding but by
    replicating it.
    """
    sharding = config.activation_sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return promote_dtype
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())

    def promote(*arrays: Any, **options: Any) -> Any:
        promoted = promote_dtype(*arrays, **options)
        return [jax.lax.with_sharding_constraint(promoted[0], whole)] if len(arrays) == 1 else promoted

    return promote


def _remat(config: DecoderConfig) -> Any:
    if config.remat_policy == "none":
        return DecoderLayer
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass.
    return nn.remat(DecoderLayer, policy=REMAT_POLICIES[config.remat_policy], prevent_cse=not config.scan_layers)


def _run_layers(c: DecoderConfig, x: jax.Array, mask: jax.Array, positions: jax.Array) -> jax.Array:
    # No method of the module: Linen would put its name into the path of every layer.
    layer = _remat(c)
    if c.scan_layers:
        layers = nn.scan(
            layer,
            in_axes=(nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
            length=c.num_layers,
            **SCANNED,
        )
        x, _ = layers(c, name="layers")(x, mask, positions)
        return x
    for index in range(c.num_layers):
        x, _ = layer(c, name=f"layers_{index}")(x, mask, positions)
    return x


def _run_cached_layers(
    c: DecoderConfig, x: jax.Array, mask: jax.Array, positions: jax.Array, cache: KVCache, valid: jax.Array | None
) -> tuple[jax.Array, KVCache]:
    def run(layer: DecoderLayer, carry: tuple[jax.Array, KVCache], index: Any) -> Any:
        x, cached = layer(carry[0], mask, positions, Cached(carry[1], valid, index))
        assert cached is not None
        return (x, cached.cache), None

    carry = x, cache
    if c.scan_layers:
        # The cache is carried, and not scanned over: a layer then writes its few tokens in place.
        scan = nn.scan(run, length=c.num_layers, **SCANNED)
        return scan(DecoderLayer(c, name="layers"), carry, jnp.arange(c.num_layers))[0]
    for index in range(c.num_layers):
        carry, _ = run(DecoderLayer(c, name=f"layers_{index}"), carry, index)
    return carry
