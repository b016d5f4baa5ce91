"""A decoder in plain Linen, Llama-style, with experts and latent attention. It knows nothing of quantization.

Module paths carry MaxText's names, so that its mixed-precision files and rules fit:
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

from jaxquant.ops.remat import compress_residuals, save_matmuls, save_quantized
from jaxquant.serving import kv_cache
from jaxquant.serving.kv_cache import KVCache
from jaxquant.training.attention import Kind, attend, rotate, visibility
from jaxquant.training.config import Shape

HEAD_ELEMENTS = 2**27
"""Logits of one sequence that a loss holds at a time: half a gigabyte of float32."""

REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "matmuls": save_matmuls,
    "quantized": save_quantized,
}
"""What the backward pass keeps, by the name of a ``remat_policy``; "none" keeps everything."""

SCANNED: Any = {
    "variable_axes": {"params": 0, "_overwrite_with_gradient": 0, "intermediates": 0},
    "split_rngs": {"params": True, "quant": True},
}
"""What ``nn.scan`` does with the layers' variables and random streams."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig(Shape):
    """A decoder's shape, with its dtype, the kind of its attention and where its activations lie."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    attention: Kind = "xla"
    activation_sharding: jax.sharding.Sharding | None = None

    def dense(self, features: int | tuple[int, ...], axis: int | tuple[int, ...] = -1) -> nn.DenseGeneral:
        dtype = jnp.dtype(self.dtype)
        return nn.DenseGeneral(features, axis=axis, use_bias=False, dtype=dtype, param_dtype=jnp.float32)

    def norm(self) -> nn.RMSNorm:
        kind = CompressedNorm if self.saved_activations == "fp8" else nn.RMSNorm
        return kind(epsilon=self.norm_epsilon, dtype=jnp.dtype(self.dtype), param_dtype=jnp.float32)

    def gate(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return ``silu(a) * b``."""
        gate = lambda a, b: nn.silu(a) * b  # noqa: E731
        return (compress_residuals(gate, (0, 1)) if self.saved_activations == "fp8" else gate)(a, b)


class CompressedNorm(nn.RMSNorm):
    """``nn.RMSNorm`` whose backward pass reads its input back from FP8."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        plain = nn.RMSNorm(epsilon=self.epsilon, dtype=self.dtype, param_dtype=self.param_dtype, parent=None)
        return compress_residuals(lambda x, scale: plain.apply({"params": {"scale": scale}}, x))(x, scale)


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


def empty_cache(c: DecoderConfig, batch: int, length: int, **quantization: Any) -> KVCache:
    """Make an empty cache for a decoder: ``length`` positions of ``batch`` texts.

    Args:
      c: the decoder's shape; its dtype is that of a cache that is not quantized.
      batch, length: rows and the places of each.
      quantization: ``kv_quant_dtype`` and ``kv_quant_axis``, see ``jaxquant.serving.kv_cache``.
    """
    sizes = {"layers": c.num_layers, "dtype": c.dtype}
    return kv_cache.empty(batch, length, c.num_kv_heads, c.head_dim, **sizes, **quantization)


def masks(
    c: DecoderConfig,
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    cache: KVCache | None,
) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
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


class SelfAttention(nn.Module):
    """Grouped-query attention; ``mask`` says where a query may look (``masks``)."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.query = c.dense((c.num_query_heads, c.head_dim))
        self.key = c.dense((c.num_kv_heads, c.head_dim))
        self.value = c.dense((c.num_kv_heads, c.head_dim))
        self.out = c.dense(c.emb_dim, axis=(-2, -1))

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, positions: jax.Array, cached: Cached | None = None
    ) -> tuple[jax.Array, Cached | None]:
        c = self.config
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key = rotate(query, positions, c.rope_theta), rotate(key, positions, c.rope_theta)
        if cached is not None:
            cached, key, value = cached.update(key, value, positions)
        # XLA's attention takes any mask, and so a cache's.
        kind = c.attention if cached is None else "xla"
        return self.out(attend(query, key, value, mask, kind, c.activation_sharding)), cached


class LatentAttention(nn.Module):
    """Attention whose keys and values are made of a latent of ``kv_lora_rank`` numbers a token, as DeepSeek's are.

    The last ``rope_head_dim`` of a head's ``head_dim`` numbers are rotated; those of the key are one for all heads, and
    come from the token itself. A cache holds whole keys and values.
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
        self, x: jax.Array, mask: jax.Array | None, positions: jax.Array, cached: Cached | None = None
    ) -> tuple[jax.Array, Any]:
        c = self.config
        still = c.head_dim - c.rope_head_dim
        query = self.wq_b(self.q_norm(self.wq_a(x))) if c.q_lora_rank else self.query(x)
        latent, turning = jnp.split(self.wkv_a(x), [c.kv_lora_rank], axis=-1)
        key, value = jnp.split(self.wkv_b(self.kv_norm(latent)), [still], axis=-1)
        turned = rotate(turning[:, :, None], positions, c.rope_theta)
        turned = jnp.broadcast_to(turned, (*key.shape[:-1], c.rope_head_dim))
        key = jnp.concatenate([key, turned], axis=-1)
        turned = rotate(query[..., still:], positions, c.rope_theta)
        query = jnp.concatenate([query[..., :still], turned], axis=-1)
        if cached is not None:
            cached, key, value = cached.update(key, value, positions)
        kind = c.attention if cached is None else "xla"
        return self.out(attend(query, key, value, mask, kind, c.activation_sharding)), cached


class Mlp(nn.Module):
    """SwiGLU: ``wo(silu(wi_0(x)) * wi_1(x))``, ``copies`` times as wide as ``mlp_dim``."""

    config: DecoderConfig
    copies: int = 1

    def setup(self) -> None:
        c, size = self.config, self.copies * self.config.mlp_dim
        self.wi_0, self.wi_1, self.wo = c.dense(size), c.dense(size), c.dense(c.emb_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(self.config.gate(self.wi_0(x), self.wi_1(x)))


class Experts(nn.Module):
    """SwiGLU of the ``num_experts_per_tok`` experts that a router picks for each token; no token is dropped.

    ``y = Σ_e p_e · wo_e(silu(wi_0_e(x)) * wi_1_e(x))`` over the largest probabilities p of ``softmax(gate(x))``, which
    are divided by their sum. The router and the sum are in float32. Rows are sorted by their expert, and each matrix is
    one ``jax.lax.ragged_dot``; no loss balances how often an expert is picked.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.gate = nn.Dense(c.num_experts, use_bias=False, dtype=jnp.float32, param_dtype=jnp.float32)
        make = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
        inner, outer = (c.num_experts, c.emb_dim, c.mlp_dim), (c.num_experts, c.mlp_dim, c.emb_dim)
        self.wi_0, self.wi_1 = self.param("wi_0", make, inner), self.param("wi_1", make, inner)
        self.wo = self.param("wo", make, outer)

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        tokens = x.reshape(-1, c.emb_dim)
        share, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(tokens)), c.num_experts_per_tok)
        share /= share.sum(axis=-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)

        def experts(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return jax.lax.ragged_dot(rows, weights.astype(x.dtype), sizes)

        rows = tokens[order // c.num_experts_per_tok]
        rows = experts(c.gate(experts(rows, self.wi_0), experts(rows, self.wi_1)), self.wo)
        rows = rows[jnp.argsort(order)].reshape(*chosen.shape, c.emb_dim).astype(jnp.float32)
        return (rows * share[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)


class DecoderLayer(nn.Module):
    """One pre-norm layer, shaped as the body of a scan over layers."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.pre_self_attention_layer_norm = c.norm()
        self.self_attention = LatentAttention(c) if c.kv_lora_rank else SelfAttention(c)
        self.post_self_attention_layer_norm = c.norm()
        self.mlp = Experts(c) if c.num_experts else Mlp(c)
        self.shared_experts = Mlp(c, c.shared_experts) if c.shared_experts else None

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, positions: jax.Array, cached: Cached | None = None
    ) -> tuple[jax.Array, Cached | None]:
        mixed, cached = self.self_attention(self.pre_self_attention_layer_norm(x), mask, positions, cached)
        x = x + mixed
        normal = self.post_self_attention_layer_norm(x)
        x = x + self.mlp(normal)
        if self.shared_experts is not None:
            x = x + self.shared_experts(normal)
        return constrain(x, self.config), cached


class Decoder(nn.Module):
    """Tokens to logits (float32) or, where ``targets`` are given, to the loss of each token.

    Packed documents do not see each other: a query looks at keys before it with its own segment id.

    With a ``cache`` each row is one document. Its tokens, at ``positions``, are written to the cache, those with
    segment id 0 are not. Each looks at what the cache reads back from its own position and those before it, so that it
    does not matter in how many calls they came. The cache comes back beside the logits.
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
        mask, positions, valid = masks(c, tokens, segment_ids, positions, cache)

        def layer(module: Any, carry: tuple[jax.Array, KVCache | None], index: Any) -> Any:
            x, cache = carry
            x, cached = module(x, mask, positions, None if cache is None else Cached(cache, valid, index))
            return x, None if cached is None else cached.cache

        x, cache = self.run_layers(layer, (constrain(self.token_embedder(tokens), c), cache))
        x = self.decoder_norm(x)
        head = self.token_embedder if c.logits_via_embedding else self.logits_dense

        def logits(head: Any, x: jax.Array) -> jax.Array:
            return head.attend(x) if c.logits_via_embedding else head(x)

        if targets is None:
            found = logits(head, x).astype(jnp.float32)
            return found if cache is None else (found, cache)
        n = head_chunks(c, x.shape[1])
        if n == 1:
            return cross_entropy(logits(head, x), targets)
        # From logits that are made piece by piece, again in the backward pass.
        piece = lambda head, item: cross_entropy(logits(head, item[0]), item[1])  # noqa: E731
        cut = lambda x: x.reshape(x.shape[0], n, -1, *x.shape[2:]).swapaxes(0, 1)  # noqa: E731
        return self.run_pieces(piece, head, (cut(x), cut(targets))).swapaxes(0, 1).reshape(targets.shape)

    @nn.nowrap  # else its name would be in the path of every layer
    def run_layers(self, layer: Any, carry: Any) -> Any:
        """Run ``layer(module, carry, index)`` of one layer after the other, and return the last carry."""
        c = self.config
        if c.remat_policy != "none" and carry[1] is None:
            # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass.
            layer = nn.remat(layer, policy=REMAT_POLICIES[c.remat_policy], prevent_cse=not c.scan_layers)
        if c.scan_layers:
            # The cache is carried, and not scanned over: a layer then writes its few tokens in place.
            scan = nn.scan(lambda *inputs: (layer(*inputs), None), length=c.num_layers, **SCANNED)
            return scan(self.layers, carry, jnp.arange(c.num_layers))[0]
        for index, module in enumerate(self.layers):  # pyright: ignore[reportArgumentType]
            carry = layer(module, carry, index)
        return carry

    @nn.nowrap
    def run_pieces(self, piece: Any, head: nn.Module, items: Any) -> jax.Array:
        """Return ``piece(head, item)`` of one item after the other; nothing of them is kept for the backward pass."""
        shared = ["params", "_overwrite_with_gradient", "intermediates"]
        body = nn.remat(lambda head, carry, item: (carry, piece(head, item)), prevent_cse=False)
        scan = nn.scan(body, variable_broadcast=shared, split_rngs={"params": False, "quant": True})
        return scan(head, None, items)[1]


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
