"""Decoder in plain Linen with the options of Llama and related families; contains no quantization code.

Module paths use MaxText's names, so that its mixed-precision files and rules apply:
``layers/self_attention/{query,key,value,out}``, ``layers/mlp/{wi_0,wi_1,wo}``, ``token_embedder``, ``decoder_norm``,
``logits_dense``.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jaxquant.ops.remat import save_matmuls, save_quantized
from jaxquant.serving import kv_cache
from jaxquant.serving.kv_cache import KVCache
from jaxquant.training.layers import DecoderConfig, DecoderLayer, constrain, make_context

HEAD_ELEMENTS = 2**27
"""Maximum number of logits of one sequence in memory at a time: half a gigabyte of float32."""

REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "matmuls": save_matmuls,
    "quantized": save_quantized,
}
"""Checkpoint policy of each ``remat_policy``; "none" saves everything."""

SCANNED: Any = {
    "variable_axes": {"params": 0, "_overwrite_with_gradient": 0, "intermediates": 0},
    "split_rngs": {"params": True, "quant": True},
}
"""Arguments of ``nn.scan`` for the layers' variables and random streams."""


def empty_cache(c: DecoderConfig, batch: int, length: int, **quantization: Any) -> KVCache:
    """Create an empty cache for a decoder, with ``length`` positions for each of ``batch`` texts.

    Args:
      c: shape of the decoder; its dtype is the cache's dtype if the cache is not quantized.
      batch, length: number of texts, and number of positions per text.
      quantization: ``kv_quant_dtype`` and ``kv_quant_axis``, see ``jaxquant.serving.kv_cache``; exact numerics
        store digits.
    """
    sizes = {"layers": c.num_layers, "dtype": c.dtype}
    if c.numerics == "exact":
        if name := quantization.get("kv_quant_dtype"):
            raise ValueError(f"numerics 'exact' stores digits in the cache, got kv_quant_dtype {name!r}; leave it out")
        quantization = {"kv_quant_dtype": kv_cache.DIGITS}
    return kv_cache.empty(batch, length, c.num_kv_heads, c.head_dim, **sizes, **quantization)


def head_chunks(c: DecoderConfig, length: int) -> int:
    """Return the number of chunks of a sequence's logits, for a loss that computes one chunk at a time.

    It is the smallest divisor of the length that is at least ``head_chunks`` of the config. If ``head_chunks`` is 0, it
    is the smallest one with at most ``HEAD_ELEMENTS`` logits in a chunk.
    """
    least = c.head_chunks or math.ceil(length * c.vocab_size / HEAD_ELEMENTS)
    return next((n for n in range(least, length + 1) if length % n == 0), length)


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
            self.logits_dense = c.float_dense(c.vocab_size, c.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
        targets: jax.Array | None = None,
    ) -> Any:
        c = self.config
        context = make_context(c, tokens, segment_ids, positions, cache)

        def layer(module: Any, carry: tuple[jax.Array, KVCache | None], index: Any) -> Any:
            x, cache = carry
            return module(x, context._replace(layer=index), cache)

        x = c.math.round(self.token_embedder(tokens), c.dtype)
        if c.scale_embedding:
            x = c.math.multiply(x, c.emb_dim**0.5)
        x, cache = self.run_layers(layer, (constrain(x, c), cache))
        x = self.decoder_norm(x)
        head = self.token_embedder if c.logits_via_embedding else self.logits_dense

        def logits(head: Any, x: jax.Array) -> jax.Array:
            found = c.math.logits_of_embedding(head, x) if c.logits_via_embedding else head(x)
            return c.math.soft_cap(found, c.final_logits_soft_cap) if c.final_logits_soft_cap else found

        if targets is None:
            found = logits(head, x).astype(jnp.float32)
            return found if cache is None else (found, cache)
        n = head_chunks(c, x.shape[1])
        if n == 1:
            return c.math.token_losses(logits(head, x), targets)
        # Compute the logits chunk by chunk, and compute them again in the backward pass.
        compute_chunk = lambda head, item: c.math.token_losses(logits(head, item[0]), item[1])  # noqa: E731
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
