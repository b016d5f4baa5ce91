"""The decoder with a cache: prefill at once, in chunks or token by token computes the same as the full text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.training.model import empty_cache
from tests.numerics import CACHED_LOGITS
from tests.train.decoder import SHAPE, TOKENS, made
from tests.train.test_experts import DEEPSEEK

LENGTH = 16
WINDOW = {"num_layers": 3, "sliding_window_size": 4, "global_attention_every": 2}
GEMMA = {
    **{"use_qk_norm": True, "use_post_norms": True, "scale_embedding": True, "mlp_activation": "gelu_tanh"},
    **{"attn_logits_soft_cap": 5.0, "final_logits_soft_cap": 3.0, "query_pre_attn_scalar": 8},
    **{"rope_local_theta": 100.0, "rope_type": "linear", "rope_factor": 4.0, **WINDOW},
}
GPT_OSS = {
    **{"attention_bias": "all", "attention_sinks": True, "mlp_bias": True, "mlp_activation": "clipped_swiglu"},
    **{"num_experts": 3, "rope_type": "yarn", "rope_factor": 4.0, "original_max_position_embeddings": 8, **WINDOW},
}
RNGS = {"quant": jax.random.key(1)}
SCHEMES = [
    ({"quantization": ""}, {"scan_layers": False, "logits_via_embedding": False, "remat_policy": "full"}),
    ({"quantization": "int8", "quant_backend": "native"}, {}),
    ({"quantization": "fp8"}, {"scan_layers": False}),
    ({"quantization": ""}, DEEPSEEK),
    ({"quantization": ""}, GEMMA),
    ({"quantization": ""}, GPT_OSS),
    ({"quantization": ""}, {**GPT_OSS, "scan_layers": False}),
]
IDS = [f"{fields['quantization'] or 'float'} {'scanned' if not shape else 'unscanned'}" for fields, shape in SCHEMES]


class LayerCache:
    """A decoder, its parameters, and a jitted step through its cache."""

    def __init__(self, fields, shape):
        self.shape = dataclasses.replace(SHAPE, **shape)
        self.model = made(self.shape, **fields)
        self.params, self.quant_state = jax.jit(self.model.init)(jax.random.key(0))
        if fields["quantization"] == "fp8":  # without a history, scales depend on the tokens of the call
            self.quant_state = jaxquant.state.update(self.quant_state, self._seen())
        self.cache = empty_cache(self.shape, len(TOKENS), LENGTH)
        self._step = jax.jit(
            lambda cache, tokens, segments, positions: self.model.apply(
                self.params, self.quant_state, tokens, segments, positions, rngs=RNGS, cache=cache
            )
        )

    def _seen(self):
        loss = lambda state: (self.model.apply(self.params, state, TOKENS, rngs=RNGS) ** 2).mean()  # noqa: E731
        return jax.jit(jax.grad(loss))(self.quant_state)

    def whole(self, tokens=TOKENS):
        return jax.jit(lambda tokens: self.model.apply(self.params, self.quant_state, tokens, rngs=RNGS))(tokens)

    def run(self, cuts, tokens=TOKENS):
        """Pass the tokens in chunks that end at ``cuts``; return logits and cache."""
        cache, logits, start = self.cache, [], 0
        for end in cuts:
            positions = jnp.broadcast_to(jnp.arange(start, end), (len(tokens), end - start))
            out, cache = self._step(cache, tokens[:, start:end], jnp.ones_like(positions), positions)
            logits.append(out)
            start = end
        return jnp.concatenate(logits, axis=1), cache


ONCE, CHUNKED, DECODED = (12,), (4, 8, 12), (4, *range(5, 13))


@pytest.mark.parametrize(("fields", "shape"), SCHEMES, ids=IDS)
def test_an_unquantized_cache_changes_only_the_order_of_sums(fields, shape):
    decoder = LayerCache(fields, shape)
    whole = decoder.whole()
    bound = CACHED_LOGITS[fields["quantization"]] * jnp.abs(whole).max()
    for cuts in (ONCE, CHUNKED, DECODED):
        logits, _ = decoder.run(cuts)
        np.testing.assert_allclose(logits, whole, rtol=0, atol=bound)
        np.testing.assert_array_equal(logits.argmax(-1), whole.argmax(-1))
    with pytest.raises(ValueError, match="a KV cache requires positions; pass"):
        decoder.model.apply(decoder.params, decoder.quant_state, TOKENS, rngs=RNGS, cache=decoder.cache)
