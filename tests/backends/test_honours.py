"""A backend raises an error for every field that it does not list as supported, including later fields."""

from __future__ import annotations

import contextlib
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.linen.initializers import ones

import jaxquant
from jaxquant.backends import load
from jaxquant.backends.honours import check_honoured
from jaxquant.compat import maxtext
from jaxquant.config.backends import BACKENDS
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec
from jaxquant.ops.implementation import REFUSED, collect_choices

INT8 = TensorSpec("int8")
X = jnp.ones((8, 16))


@pytest.mark.parametrize("name", ["aqt", "qwix"])
def test_a_field_that_a_backend_has_not_heard_of_is_refused(name):
    backend = load(name)
    newer = dataclasses.make_dataclass("TensorSpec", [("added", int, 0)], bases=(TensorSpec,), frozen=True)
    honours = {**backend.honours, newer: backend.honours[TensorSpec]}
    check_honoured(backend.row.title, honours, Recipe("mine", MatmulSpec(newer("int8"), INT8)))
    with pytest.raises(NotImplementedError, match=r"does not support added 3, which recipe 'mine' has in fwd_lhs"):
        check_honoured(backend.row.title, honours, Recipe("mine", MatmulSpec(newer("int8", added=3), INT8)))


def test_a_model_is_refused_before_it_runs():
    """A model is checked when it is quantized, even if the op of a layer is only created at the first call."""
    recipe = Recipe("mine", MatmulSpec(TensorSpec("float4_e2m1fn"), INT8))
    config = QuantConfig(quant_backend="aqt", rules=(jaxquant.config.rules.Rule(".*", recipe),))
    for refuse in (
        lambda: jaxquant.maybe_quantize_model(nn.Dense(4), config),
        lambda: maxtext.configure_quantization(config),
    ):
        with pytest.raises(NotImplementedError, match="AQT does not support dtype float4_e2m1fn, which recipe 'mine'"):
            refuse()


@pytest.mark.parametrize("backend", ["native", "aqt", "qwix"])
def test_float16_is_right_or_refused(backend):
    """Sums of 960 int8 products exceed 65504, and weight scales are below the root of the smallest float16."""
    x, layer = jax.random.normal(jax.random.key(0), (4, 960), jnp.float16), nn.Dense(8, dtype=jnp.float16)
    model = jaxquant.maybe_quantize_model(layer, {"quantization": "int8", "quant_backend": backend})
    variables = layer.init(jax.random.key(0), x)
    if backend != "native":
        with pytest.raises(ValueError, match=f"quantizes no layer .*: {BACKENDS[backend].title} .* 'native', or"):
            model.apply(variables, x)
        return
    out, wanted = model.apply(variables, x), layer.apply(variables, x)
    assert jnp.linalg.norm(out - wanted) < 0.02 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize(("string", "backend"), [("int8", "aqt"), ("fp8_e4m3", "qwix")])
def test_shards_that_do_not_divide_are_refused(string, backend):
    """With 5 shards of 8 rows, Qwix used 4 blocks; 16 shards raised one of Qwix's own errors."""
    for count in (4, 5):
        config = {"quantization": string, "quant_backend": backend, "quantization_local_shard_count": count}
        model = jaxquant.maybe_quantize_model(nn.Dense(4), config, X)
        params = jax.eval_shape(model.init, jax.random.key(0), X)
        refused = pytest.raises(ValueError, match=rf"shard_count {count} of '{string}' .* of size 8; use a div")
        with refused if 8 % count else contextlib.nullcontext():
            text = str(jax.make_jaxpr(jax.grad(lambda params, model=model: model.apply(params, X).sum()))(params))
            assert backend == "aqt" or f"{count},{8 // count},4" in text.replace(" ", "")


class Served(nn.Module):
    quant: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dot_general_cls=self.quant and self.quant.dot_general_cls())(x)
        return (self.quant.einsum() if self.quant else jnp.einsum)("bd,df->bf", x, self.param("w", ones, (8, 4)))


def test_an_implementation_that_is_asked_for_reaches_every_op():
    config, x = {"quantization": "fp8_current", "implementation": "pallas"}, X[:, :8]
    plain = Served(None)
    variables = plain.init(jax.random.key(0), x)
    converted = jaxquant.convert(plain, variables, config, x)
    for model, given in (
        (jaxquant.maybe_quantize_model(plain, config, x), variables),
        (Served(maxtext.configure_quantization(config)), variables),
        (jaxquant.maybe_quantize_model(plain, config | {"checkpoint_is_quantized": True}, x), converted),
    ):
        with collect_choices() as choices:
            jax.eval_shape(model.apply, given, x)
        reasons = {row["reason"] for row in choices if row["piece"] == "dot_general"}
        assert reasons
        assert all(reason.startswith(REFUSED) or reason == "requested" for reason in reasons), reasons
