"""The decoder: parameter names, causality, document boundaries; remat and scan do not change the numbers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxquant.training.attention import Rope, rotate
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.model import Decoder
from jaxquant.training.optimizer import DECAYED
from jaxquant.training.sharding import PARAMETER_AXES

SMALL = DecoderConfig(64, 32, 64, 2, 4, 2, 16)
UNTIED = dataclasses.replace(SMALL, logits_via_embedding=False)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)


def _init(config: DecoderConfig):
    return Decoder(config).init(jax.random.key(0), TOKENS)


def test_parameter_names_and_shapes():
    shapes = {"/".join(path): leaf.shape for path, leaf in flatten_dict(_init(UNTIED)["params"]).items()}
    assert shapes == {
        "token_embedder/embedding": (64, 32),
        "layers/pre_self_attention_layer_norm/scale": (2, 32),
        "layers/self_attention/query/kernel": (2, 32, 4, 16),
        "layers/self_attention/key/kernel": (2, 32, 2, 16),
        "layers/self_attention/value/kernel": (2, 32, 2, 16),
        "layers/self_attention/out/kernel": (2, 4, 16, 32),
        "layers/post_self_attention_layer_norm/scale": (2, 32),
        "layers/mlp/wi_0/kernel": (2, 32, 64),
        "layers/mlp/wi_1/kernel": (2, 32, 64),
        "layers/mlp/wo/kernel": (2, 64, 32),
        "decoder_norm/scale": (32,),
        "logits_dense/kernel": (32, 64),
    }
    assert "logits_dense/kernel" not in {"/".join(path) for path in flatten_dict(_init(SMALL)["params"])}
    for path, leaf in flatten_dict(_init(UNTIED)["params"]).items():
        matrix = path[-1] != "scale"
        assert (path[-2:] in PARAMETER_AXES) == matrix == (path[-1] in DECAYED)
        assert not matrix or leaf.shape[PARAMETER_AXES[path[-2:]]["fsdp"]] == SMALL.emb_dim


def test_a_token_does_not_see_later_ones():
    variables = _init(SMALL)
    changed = TOKENS.at[:, 7].add(1)
    before, after = (Decoder(SMALL).apply(variables, tokens) for tokens in (TOKENS, changed % 64))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7:] - after[:, 7:]).min(axis=-1).min() >= 0
    assert (before[:, 8] != after[:, 8]).any()


def test_packed_documents_do_not_see_each_other():
    variables = _init(SMALL)
    segments = jnp.asarray([[1] * 5 + [2] * 7] * 2)
    positions = jnp.asarray([[*range(5), *range(7)]] * 2)
    packed = Decoder(SMALL).apply(variables, TOKENS, segments, positions)
    other = Decoder(SMALL).apply(variables, TOKENS.at[:, :5].set(0), segments, positions)
    np.testing.assert_array_equal(packed[:, 5:], other[:, 5:])
    alone = Decoder(SMALL).apply(variables, TOKENS[:, 5:])
    np.testing.assert_allclose(packed[:, 5:], alone, rtol=0, atol=1e-5)


def test_rotation_depends_on_distance_alone():
    x = jax.random.normal(jax.random.key(1), (1, 2, 1, 16))
    products = []
    for start in (0, 9):
        query, key = (rotate(x[:, i : i + 1], jnp.full((1, 1), start + 3 * i), Rope(1e4)) for i in range(2))
        products.append((query * key).sum())
    np.testing.assert_allclose(products[0], products[1], rtol=1e-5)


@pytest.mark.parametrize("policy", ["full", "matmuls"])
def test_remat_leaves_gradients_alone(policy):
    variables = _init(SMALL)

    def grads(config):
        loss = lambda v: jnp.mean(Decoder(config).apply(v, TOKENS) ** 2)  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.grad(loss))(variables))

    for plain, rematerialized in zip(grads(SMALL), grads(dataclasses.replace(SMALL, remat_policy=policy)), strict=True):
        np.testing.assert_allclose(rematerialized, plain, rtol=1e-5, atol=1e-8)


def test_unscanned_layers_compute_the_same():
    variables = _init(SMALL)["params"]
    apart = {name: tree for name, tree in variables.items() if name != "layers"}
    for index in range(2):
        apart[f"layers_{index}"] = jax.tree.map(lambda leaf, i=index: leaf[i], variables["layers"])
    unscanned = Decoder(dataclasses.replace(SMALL, scan_layers=False)).apply({"params": apart}, TOKENS)
    np.testing.assert_allclose(unscanned, Decoder(SMALL).apply({"params": variables}, TOKENS), rtol=0, atol=1e-5)
