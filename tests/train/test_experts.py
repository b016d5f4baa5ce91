"""Experts and latent attention of the training program: compared with loops, and served as trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core.qtensor import is_tensor
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import convert_run
from jaxquant.training.generate import Prompt
from jaxquant.training.layers import DecoderConfig, Experts
from jaxquant.training.serving import open_served
from tests import numerics
from tests.train.conftest import train

_NAMES = ("wi_0", "wi_1", "wo")
DEEPSEEK = {"num_experts": 4, "shared_experts": 1, "num_kv_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
DEEPSEEK |= {"rope_head_dim": 8}
MIXTRAL = {"num_experts": 4, "num_experts_per_tok": 2}


def test_experts_are_a_loop_over_tokens_and_their_experts():
    layer = Experts(DecoderConfig(64, 32, 48, num_experts=5, num_experts_per_tok=2))
    x = jax.random.normal(jax.random.key(0), (2, 7, 32))
    params = layer.init(jax.random.key(1), x)["params"]
    gate, *weights = (np.asarray(leaf, np.float64) for leaf in (params["gate"]["kernel"], *map(params.get, _NAMES)))
    expected = []
    for token in np.asarray(x, np.float64).reshape(-1, 32):
        share = np.exp(token @ gate)
        chosen = np.argsort(-share)[:2]
        outs = []
        for first, second, last in zip(*(each[chosen] for each in weights), strict=True):
            inner = token @ first
            outs.append((inner / (1 + np.exp(-inner)) * (token @ second)) @ last)
        expected.append(share[chosen] / share[chosen].sum() @ np.stack(outs))
    found = np.asarray(layer.apply({"params": params}, x)).reshape(-1, 32)
    # Three products of up to 48 terms in a row, of float32.
    np.testing.assert_allclose(found, expected, rtol=0, atol=3 * 48 * numerics.FLOAT32_EPS * np.abs(expected).max())


def test_what_does_not_fit_is_named():
    for fields, message in (
        ({"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok must lie between 1 and num_experts 2, go"),
        ({"rope_head_dim": 8}, "require latent attention, but kv_lora_rank is 0"),
        (DEEPSEEK | {"num_kv_heads": 2}, "num_kv_heads must be num_query_heads 8 with kv_lora_rank 16"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(**fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "quantization", "dtypes"),
    [(DEEPSEEK, "fp8", {"dtype": "bfloat16", "weight_dtype": "bfloat16"}), (MIXTRAL, "fp8_block", {})],
)
def test_what_is_served_is_what_was_trained(style, quantization, dtypes, tiny: TrainConfig, tmp_path: Any):
    run, out = tmp_path / "run", tmp_path / "out"
    fields = {"quantization": quantization, "steps": 2, "checkpoint_every": 0, "eval_batches": 1}
    train(dataclasses.replace(tiny, **fields, **style, **dtypes), run)
    convert_run(run, out, say=lambda text: None)
    trained, served = open_served(run), open_served(out)
    assert sum(map(is_tensor, jax.tree.leaves(served.params["layers"]["mlp"], is_leaf=is_tensor))) == len(_NAMES)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 32)), jnp.int32)

    def logits(own: Any) -> jax.Array:
        apply = jax.jit(lambda *variables: own.model.apply(*variables, tokens, rngs={"quant": jax.random.key(0)}))
        return apply(own.params, own.quant_state)

    np.testing.assert_array_equal(logits(trained), logits(served))
    (made,) = served.engine(max_length=24, slots=2).generate([Prompt([65, 66, 67], "", 0)], 4)
    assert len(made.tokens) == 4
