"""What a backend does not say it honours is refused by its name, fields that are added later among it."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxquant
from jaxquant.backends import load
from jaxquant.backends.honours import check_honoured
from jaxquant.compat import maxtext
from jaxquant.config.backends import BACKENDS
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec

INT8 = TensorSpec("int8")
X = jnp.ones((8, 16))


@pytest.mark.parametrize("name", ["aqt", "qwix"])
def test_a_field_that_a_backend_has_not_heard_of_is_refused(name):
    backend = load(name)
    newer = dataclasses.make_dataclass("TensorSpec", [("added", int, 0)], bases=(TensorSpec,), frozen=True)
    honours = {**backend.honours, newer: backend.honours[TensorSpec]}
    check_honoured(backend.row.title, honours, Recipe("mine", MatmulSpec(newer("int8"), INT8)))
    with pytest.raises(NotImplementedError, match=r"recipe 'mine' operand fwd_lhs: .* has no added 3"):
        check_honoured(backend.row.title, honours, Recipe("mine", MatmulSpec(newer("int8", added=3), INT8)))


def test_a_model_is_refused_before_it_runs():
    """The check comes with the quantization, also where a layer's op is only made at its first call."""
    recipe = Recipe("mine", MatmulSpec(TensorSpec("float4_e2m1fn"), INT8))
    config = QuantConfig(quant_backend="aqt", rules=(jaxquant.config.rules.Rule(".*", recipe),))
    for refuse in (
        lambda: jaxquant.maybe_quantize_model(nn.Dense(4), config),
        lambda: maxtext.configure_quantization(config),
    ):
        with pytest.raises(NotImplementedError, match="'mine' operand fwd_lhs: AQT has no element type float4_e2m1fn"):
            refuse()


@pytest.mark.parametrize("case", ["int8 native", "int8 aqt", "int8 qwix"])
def test_float16_is_right_or_refused(case):
    """Sums of 960 products of int8 are above 65504; the scales of weights are below the root of its smallest number."""
    x = jax.random.normal(jax.random.key(0), (4, 960), jnp.float16)
    layer, (string, backend) = nn.Dense(8, dtype=jnp.float16), case.split()
    model = jaxquant.maybe_quantize_model(layer, {"quantization": string, "quant_backend": backend})
    variables = layer.init(jax.random.key(0), x)
    if backend in ("aqt", "qwix"):
        with pytest.raises(ValueError, match=f"would quantize no layer .*: {BACKENDS[backend].title} .* 'native', or"):
            model.apply(variables, x)
        return
    out, wanted = model.apply(variables, x), layer.apply(variables, x)
    assert jnp.linalg.norm(out - wanted) < 0.02 * jnp.linalg.norm(wanted)


# -- shards of Qwix ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "fits"), [(4, True), (5, False)])
def test_qwix_shards_that_do_not_divide(count, fits):
    """Of 5 shards over 8 rows Qwix made 4 blocks, and 16 failed in words of its own."""
    config = {"quantization": "fp8_e4m3", "quant_backend": "qwix", "quantization_local_shard_count": count}
    model = jaxquant.maybe_quantize_model(nn.Dense(4), config, X)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    trace = jax.make_jaxpr(jax.grad(lambda params: model.apply(params, X).sum()))
    if fits:
        text = str(trace(params))
        assert f"{count},{8 // count},4" in text.replace(" ", "") or count == 1
        return
    with pytest.raises(
        ValueError, match=rf"quantization_local_shard_count {count} of 'fp8_e4m3' .* which has size 8; use a divisor"
    ):
        trace(params)
