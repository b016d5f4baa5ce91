"""Decoder in plain Linen with the options of Llama and related families; contains no quantization code.

Module paths use MaxText's names, so that its mixed-precision files and rules apply:
``layers/self_attention/{query,key,value,out}``, ``layers/mlp/{wi_0,wi_1,wo}``, ``token_embedder``, ``decoder_norm``,
``logits_dense``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.dtypes import promote_dtype

from jaxquant.export.decoder import rope_magnitude, rope_stretch
from jaxquant.ops.remat import compress_residuals, save_matmuls, save_quantized
from jaxquant.serving import kv_cache
from jaxquant.serving.kv_cache import KVCache
from jaxquant.training.attention import Kind, Rope, attend, make_mask, rotate
from jaxquant.training.config import DecoderOptions

HEAD_ELEMENTS = 2**27
"""Maximum number of logits of one sequence in memory at a time: half a gigabyte of float32."""

REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "matmuls": save_matmuls,
    "quantized": save_quantized,
}
"""Checkpoint policy of each ``remat_policy``; "none" saves everything."""

GATES: dict[str, Any] = {
    "silu": lambda a, b: nn.silu(a) * b,
    "gelu_tanh": lambda a, b: nn.gelu(a, approximate=True) * b,
    "clipped_swiglu": lambda a, b: clipped_swiglu(jnp.minimum(a, 7), jnp.clip(b, -7, 7)),
}
"""Gated activation of each ``mlp_activation``."""

SCANNED: Any = {
    "variable_axes": {"params": 0, "_overwrite_with_gradient": 0, "intermediates": 0},
    "split_rngs": {"params": True, "quant": True},
}
"""Arguments of ``nn.scan`` for the layers' variables and random streams."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig(DecoderOptions):
    """Shape of a decoder, with its dtype, attention kind and activation sharding."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    attention: Kind = "xla"
    activation_sharding: jax.sharding.Sharding | None = None

    def dense(
        self, features: int | tuple[int, ...], axis: int | tuple[int, ...] = -1, use_bias: bool = False
    ) -> nn.DenseGeneral:
        dtype = jnp.dtype(self.dtype)
        return nn.DenseGeneral(features, axis=axis, use_bias=use_bias, dtype=dtype, param_dtype=jnp.float32)

    def norm(self) -> nn.RMSNorm:
        kind = CompressedNorm if self.saved_activations == "fp8" else nn.RMSNorm
        return kind(epsilon=self.norm_epsilon, dtype=jnp.dtype(self.dtype), param_dtype=jnp.float32)

    def gate(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the gated activation of an MLP, ``silu(a) * b`` for ``mlp_activation`` "silu"."""
        gate = GATES[self.mlp_activation]
        return (compress_residuals(gate, (0, 1)) if self.saved_activations == "fp8" else gate)(a, b)

    def is_global(self, layer: int | jax.Array) -> bool | jax.Array:
        """Return whether a layer attends to all earlier positions, not only to a sliding window."""
        every = self.global_attention_every if self.sliding_window_size else 1
        return every > 0 and (every == 1 or (layer + 1) % every == 0)

    def rope(self, is_global: bool | jax.Array) -> Rope:
        """Return the rotary embedding of a layer."""
        everywhere, theta = Rope(self.rope_theta, rope_stretch(self), rope_magnitude(self)), self.rope_local_theta
        if is_global is True or not theta:
            return everywhere
        if is_global is False:
            return Rope(theta)
        stretch = 1.0 if everywhere.stretch is None else everywhere.stretch
        return Rope(jnp.where(is_global, self.rope_theta, theta), jnp.where(is_global, stretch, 1.0))


def clipped_swiglu(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return ``a · sigmoid(1.702 a) · (b + 1)``, the activation of gpt-oss after its inputs were clipped."""
    return a * jax.nn.sigmoid(1.702 * a) * (b + 1)


class CompressedNorm(nn.RMSNorm):
    """``nn.RMSNorm`` that saves its input in FP8 for the backward pass."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        plain = nn.RMSNorm(epsilon=self.epsilon, dtype=self.dtype, param_dtype=self.param_dtype, parent=None)
        return compress_residuals(lambda x, scale: plain.apply({"params": {"scale": scale}}, x))(x, scale)


class Masks(NamedTuple):
    """What each token attends to (``make_masks``).

    Attributes:
      all: mask of layers that attend to all earlier positions.
      window: mask of layers with a sliding window.
    """

    all: jax.Array | None
    window: jax.Array | None

    def of_layer(self, is_global: bool | jax.Array) -> jax.Array | None:
        """Return the mask of a layer."""
        if isinstance(is_global, bool):
            return self.all if is_global else self.window
        if self.all is None or self.window is None:  # the kernel's own causal mask has no array
            return self.all if self.window is None else jnp.where(is_global, 0, self.window)
        return jnp.where(is_global, self.all, self.window)


class LayerCache(NamedTuple):
    """Cache state that is passed through the layers.

    Attributes:
      cache: cache of all layers.
      valid: mask [batch, tokens], False for padding, or None without padding.
      layer: index of the layer that writes and reads next.
    """

    cache: KVCache
    valid: jax.Array | None
    layer: int | jax.Array

    def update(self, key: jax.Array, value: jax.Array, positions: jax.Array) -> tuple[LayerCache, jax.Array, jax.Array]:
        """Write keys and values; return the updated state, and all cached keys and values in the dtype of ``key``."""
        cache = kv_cache.append(self.cache, key, value, positions, valid=self.valid, layer=self.layer)
        return (self._replace(cache=cache), *kv_cache.read(cache, key.dtype.name, layer=self.layer))


def empty_cache(c: DecoderConfig, batch: int, length: int, **quantization: Any) -> KVCache:
    """Create an empty cache for a decoder, with ``length`` positions for each of ``batch`` texts.

    Args:
      c: shape of the decoder; its dtype is the cache's dtype if the cache is not quantized.
      batch, length: number of texts, and number of positions per text.
      quantization: ``kv_quant_dtype`` and ``kv_quant_axis``, see ``jaxquant.serving.kv_cache``.
    """
    sizes = {"layers": c.num_layers, "dtype": c.dtype}
    return kv_cache.empty(batch, length, c.num_kv_heads, c.head_dim, **sizes, **quantization)


def make_masks(
    c: DecoderConfig,
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    cache: KVCache | None,
) -> tuple[Masks, jax.Array, jax.Array | None]:
    """Return the attention masks (``make_mask``), the positions and, with a cache, the mask of tokens to write.

    Slot t of a cache holds the token at position t, and a query attends to its own slot and all earlier slots. Later
    slots may hold stale tokens or padding.

    Raises:
      ValueError: a cache is given without positions.
    """
    window = c.sliding_window_size
    if cache is not None:
        if positions is None:
            raise ValueError("a KV cache requires positions; pass an array [batch, tokens] that counts from 0")
        distance = positions[:, None, :, None] - jnp.arange(cache.length)[None, None, None, :]
        mask = distance >= 0
        masks = Masks(mask, mask & (distance < window) if window else None)
        return masks, positions, None if segment_ids is None else segment_ids != 0
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    windowed = make_mask(c.attention, tokens, segment_ids, window) if window else None
    return Masks(make_mask(c.attention, tokens, segment_ids), windowed), positions, None


def head_chunks(c: DecoderConfig, length: int) -> int:
    """Return the number of chunks of a sequence's logits, for a loss that computes one chunk at a time.

    It is ``head_chunks`` of the config. If that is 0, it is the smallest divisor of the sequence length with at most
    ``HEAD_ELEMENTS`` logits in a chunk.
    """
    if c.head_chunks:
        return c.head_chunks
    fits = (n for n in range(1, length + 1) if length % n == 0 and length // n * c.vocab_size <= HEAD_ELEMENTS)
    return next(fits, length)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the loss of every token, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


class SelfAttention(nn.Module):
    """Grouped-query attention over the keys that ``masks`` selects for the layer."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        has_bias = c.attention_bias != "none"
        self.query = c.dense((c.num_query_heads, c.head_dim), use_bias=has_bias)
        self.key = c.dense((c.num_kv_heads, c.head_dim), use_bias=has_bias)
        self.value = c.dense((c.num_kv_heads, c.head_dim), use_bias=has_bias)
        self.out = c.dense(c.emb_dim, axis=(-2, -1), use_bias=c.attention_bias == "all")
        self.query_norm, self.key_norm = (c.norm(), c.norm()) if c.use_qk_norm else (None, None)
        zeros = nn.initializers.zeros
        self.sinks = self.param("sinks", zeros, (c.num_query_heads,)) if c.attention_sinks else None

    def __call__(
        self,
        x: jax.Array,
        masks: Masks,
        positions: jax.Array,
        layer: int | jax.Array,
        cached: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        is_global = c.is_global(layer)
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (rotate(each, positions, c.rope(is_global)) for each in (query, key))
        if cached is not None:
            cached, key, value = cached.update(key, value, positions)
        # Only XLA's attention supports the mask of a cache.
        kind = c.attention if cached is None else "xla"
        scale = c.query_pre_attn_scalar**-0.5 if c.query_pre_attn_scalar else None
        options: Any = {"scale": scale, "soft_cap": c.attn_logits_soft_cap, "sinks": self.sinks}
        mixed = attend(query, key, value, masks.of_layer(is_global), kind, c.activation_sharding, **options)
        return self.out(mixed), cached


class LatentAttention(nn.Module):
    """Attention whose keys and values are computed from a latent of ``kv_lora_rank`` numbers per token, as in DeepSeek.

    The last ``rope_head_dim`` numbers of each head's ``head_dim`` are rotated. All heads share the rotated part of a
    key, which is computed from the token directly. A cache stores complete keys and values.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        heads = (c.num_query_heads, c.head_dim)
        if c.q_lora_rank:
            self.wq_a, self.q_norm, self.wq_b = c.dense(c.q_lora_rank), c.norm(), c.dense(heads)
        else:
            self.query = c.dense(heads)
        self.wkv_a, self.kv_norm = c.dense(c.kv_lora_rank + c.rope_head_dim), c.norm()
        self.wkv_b = c.dense((c.num_query_heads, 2 * c.head_dim - c.rope_head_dim))
        self.out = c.dense(c.emb_dim, axis=(-2, -1))

    def __call__(
        self,
        x: jax.Array,
        masks: Masks,
        positions: jax.Array,
        layer: int | jax.Array,
        cached: LayerCache | None = None,
    ) -> tuple[jax.Array, Any]:
        c = self.config
        num_unrotated = c.head_dim - c.rope_head_dim
        query = self.wq_b(self.q_norm(self.wq_a(x))) if c.q_lora_rank else self.query(x)
        latent, rope_key = jnp.split(self.wkv_a(x), [c.kv_lora_rank], axis=-1)
        key, value = jnp.split(self.wkv_b(self.kv_norm(latent)), [num_unrotated], axis=-1)
        rotated = rotate(rope_key[:, :, None], positions, Rope(c.rope_theta))
        rotated = jnp.broadcast_to(rotated, (*key.shape[:-1], c.rope_head_dim))
        key = jnp.concatenate([key, rotated], axis=-1)
        rotated = rotate(query[..., num_unrotated:], positions, Rope(c.rope_theta))
        query = jnp.concatenate([query[..., :num_unrotated], rotated], axis=-1)
        if cached is not None:
            cached, key, value = cached.update(key, value, positions)
        kind = c.attention if cached is None else "xla"
        return self.out(attend(query, key, value, masks.all, kind, c.activation_sharding)), cached


class Mlp(nn.Module):
    """Gated MLP, ``wo(silu(wi_0(x)) * wi_1(x))`` for SwiGLU, with a width of ``copies * mlp_dim``."""

    config: DecoderConfig
    copies: int = 1

    def setup(self) -> None:
        c, size = self.config, self.copies * self.config.mlp_dim
        self.wi_0, self.wi_1, self.wo = (c.dense(each, use_bias=c.mlp_bias) for each in (size, size, c.emb_dim))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(self.config.gate(self.wi_0(x), self.wi_1(x)))


class Experts(nn.Module):
    """MLP of the ``num_experts_per_tok`` experts that a router selects for each token; no token is dropped.

    ``y = Σ_e p_e · wo_e(silu(wi_0_e(x)) * wi_1_e(x))`` over the largest probabilities of ``softmax(gate(x))``; p are
    these probabilities, divided by their sum if ``norm_topk_prob``. The router and the sum run in float32. Rows are
    sorted by expert, and each matrix is one ``jax.lax.ragged_dot``. There is no load-balancing loss.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.gate = nn.Dense(c.num_experts, use_bias=c.mlp_bias, dtype=jnp.float32, param_dtype=jnp.float32)
        make = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
        inner, outer = (c.num_experts, c.emb_dim, c.mlp_dim), (c.num_experts, c.mlp_dim, c.emb_dim)
        self.wi_0, self.wi_1 = self.param("wi_0", make, inner), self.param("wi_1", make, inner)
        self.wo = self.param("wo", make, outer)
        sizes = {"wi_0_bias": c.mlp_dim, "wi_1_bias": c.mlp_dim, "wo_bias": c.emb_dim} if c.mlp_bias else {}
        zeros = nn.initializers.zeros
        self.biases = [self.param(name, zeros, (c.num_experts, size)) for name, size in sizes.items()] or [None] * 3

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        tokens = x.reshape(-1, c.emb_dim)
        share, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(tokens)), c.num_experts_per_tok)
        if c.norm_topk_prob:
            share /= share.sum(axis=-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)

        def experts(rows: jax.Array, weights: jax.Array, bias: jax.Array | None) -> jax.Array:
            result = jax.lax.ragged_dot(rows, weights.astype(x.dtype), sizes)
            return result if bias is None else result + bias.astype(x.dtype)[chosen.reshape(-1)[order]]

        rows, (inner, other, outer) = tokens[order // c.num_experts_per_tok], self.biases
        gated = c.gate(experts(rows, self.wi_0, inner), experts(rows, self.wi_1, other))
        rows = experts(gated, self.wo, outer)
        rows = rows[jnp.argsort(order)].reshape(*chosen.shape, c.emb_dim).astype(jnp.float32)
        return (rows * share[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)


class DecoderLayer(nn.Module):
    """One pre-norm layer; ``layer`` is its index."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.pre_self_attention_layer_norm = c.norm()
        self.self_attention = LatentAttention(c) if c.kv_lora_rank else SelfAttention(c)
        self.post_self_attention_layer_norm = c.norm()
        self.mlp = Experts(c) if c.num_experts else Mlp(c)
        self.shared_experts = Mlp(c, c.shared_experts) if c.shared_experts else None
        if c.use_post_norms:
            self.self_attention_output_norm, self.mlp_output_norm = c.norm(), c.norm()

    def __call__(
        self,
        x: jax.Array,
        masks: Masks,
        positions: jax.Array,
        layer: int | jax.Array,
        cached: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        mixed, cached = self.self_attention(self.pre_self_attention_layer_norm(x), masks, positions, layer, cached)
        x = x + (self.self_attention_output_norm(mixed) if c.use_post_norms else mixed)
        normal = self.post_self_attention_layer_norm(x)
        result = self.mlp(normal)
        x = x + (self.mlp_output_norm(result) if c.use_post_norms else result)
        if self.shared_experts is not None:
            x = x + self.shared_experts(normal)
        return constrain(x, self.config), cached


class Decoder(nn.Module):
    """Decoder from tokens to logits (float32), or to the loss of each token if ``targets`` are given.

    Packed documents are separate: a query attends only to earlier keys with its own segment id.

    With a ``cache``, each row is one document. The tokens of a row are written to the cache at ``positions``, except
    for tokens with segment id 0. Each token attends to the cached values at its own and earlier positions, so the
    result does not depend on how the tokens are divided into calls. The updated cache is returned with the logits.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.token_embedder = nn.Embed(
            c.vocab_size,
            c.emb_dim,
            dtype=jnp.dtype(c.dtype),
            param_dtype=jnp.float32,
            promote_dtype=_promote_and_gather(c),
        )
        self.layers = DecoderLayer(c) if c.scan_layers else [DecoderLayer(c) for _ in range(c.num_layers)]
        self.decoder_norm = c.norm()
        if not c.logits_via_embedding:
            self.logits_dense = c.dense(c.vocab_size)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
        targets: jax.Array | None = None,
    ) -> Any:
        c = self.config
        masks, positions, valid = make_masks(c, tokens, segment_ids, positions, cache)

        def layer(module: Any, carry: tuple[jax.Array, KVCache | None], index: Any) -> Any:
            x, cache = carry
            x, cached = module(x, masks, positions, index, None if cache is None else LayerCache(cache, valid, index))
            return x, None if cached is None else cached.cache

        x = self.token_embedder(tokens)
        if c.scale_embedding:
            x = x * jnp.asarray(c.emb_dim**0.5, x.dtype)
        x, cache = self.run_layers(layer, (constrain(x, c), cache))
        x = self.decoder_norm(x)
        head = self.token_embedder if c.logits_via_embedding else self.logits_dense

        def logits(head: Any, x: jax.Array) -> jax.Array:
            found, cap = head.attend(x) if c.logits_via_embedding else head(x), c.final_logits_soft_cap
            return cap * jnp.tanh(found.astype(jnp.float32) / cap) if cap else found

        if targets is None:
            found = logits(head, x).astype(jnp.float32)
            return found if cache is None else (found, cache)
        n = head_chunks(c, x.shape[1])
        if n == 1:
            return cross_entropy(logits(head, x), targets)
        # Compute the logits chunk by chunk, and compute them again in the backward pass.
        compute_chunk = lambda head, item: cross_entropy(logits(head, item[0]), item[1])  # noqa: E731
        split = lambda x: x.reshape(x.shape[0], n, -1, *x.shape[2:]).swapaxes(0, 1)  # noqa: E731
        return self.run_chunks(compute_chunk, head, (split(x), split(targets))).swapaxes(0, 1).reshape(targets.shape)

    @nn.nowrap  # otherwise the name of this method would be in the path of every layer
    def run_layers(self, layer: Any, carry: Any) -> Any:
        """Run ``layer(module, carry, index)`` for all layers in order, and return the last carry."""
        c = self.config
        if c.remat_policy != "none" and carry[1] is None:
            # Inside a scan, XLA cannot merge the recomputation with the forward pass.
            layer = nn.remat(layer, policy=REMAT_POLICIES[c.remat_policy], prevent_cse=not c.scan_layers)
        if c.scan_layers:
            # The cache is part of the carry, so that a layer writes its tokens in place.
            scan = nn.scan(lambda *inputs: (layer(*inputs), None), length=c.num_layers, **SCANNED)
            return scan(self.layers, carry, jnp.arange(c.num_layers))[0]
        for index, module in enumerate(self.layers):  # pyright: ignore[reportArgumentType]
            carry = layer(module, carry, index)
        return carry

    @nn.nowrap
    def run_chunks(self, compute_chunk: Any, head: nn.Module, items: Any) -> jax.Array:
        """Run ``compute_chunk(head, item)`` for all items in order; the backward pass computes each chunk again."""
        shared = ["params", "_overwrite_with_gradient", "intermediates"]
        body = nn.remat(lambda head, carry, item: (carry, compute_chunk(head, item)), prevent_cse=False)
        scan = nn.scan(body, variable_broadcast=shared, split_rngs={"params": False, "quant": True})
        return scan(head, None, items)[1]


def constrain(x: jax.Array, config: DecoderConfig) -> jax.Array:
    """Apply the activation sharding of the config."""
    if config.activation_sharding is None:
        return x
    return jax.lax.with_sharding_constraint(x, config.activation_sharding)


def _promote_and_gather(config: DecoderConfig) -> Any:
    """Return a dtype promotion that also gathers a sharded embedding table before the lookup.

    Without this gather, the partitioner looks up tokens in every shard and can reshard the result only by replicating
    it.
    """
    sharding = config.activation_sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return promote_dtype
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())

    def promote(*arrays: Any, **options: Any) -> Any:
        promoted = promote_dtype(*arrays, **options)
        return [jax.lax.with_sharding_constraint(promoted[0], whole)] if len(arrays) == 1 else promoted

    return promote
