"""``implementation``: from the config to the op, on every way to it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxquant
from jaxquant import QuantConfig
from jaxquant.backends import native
from jaxquant.compat import maxtext

X = jnp.ones((2, 8))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="dense")(x)
        return nn.Einsum((8, 4), "bd,df->bf", name="einsum")(x)


class Handed(nn.Module):
    quant: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dot_general_cls=self.quant.dot_general_cls())(x)
        return self.quant.einsum()("bd,df->bf", x, self.param("kernel", nn.initializers.ones, (8, 4)))


@pytest.fixture
def asked(monkeypatch):
    """What each call of an op was asked for; the op itself runs without it."""
    calls = []

    def recording(op, name):
        def run(*args, **kwargs):
            calls.append((name, kwargs.pop("implementation", None)))
            return op(*args, **kwargs)

        return run

    monkeypatch.setattr(native.ops, "dot_general", recording(native.ops.dot_general, "dot_general"))
    return calls


def linen(config):
    model = jaxquant.maybe_quantize_model(Model(), config, X)
    jax.eval_shape(model.init_with_output, jax.random.key(0), X)


def linen_served(config):
    variables = Model().init(jax.random.key(0), X)
    converted = jaxquant.convert(variables, config, X, model=Model())
    served = jaxquant.maybe_quantize_model(Model(), {**config, "checkpoint_is_quantized": True}, X)
    jax.eval_shape(served.apply, converted, X)


def handle(config, mode="train"):
    model = Handed(maxtext.configure_quantization(config, mode))
    jax.eval_shape(model.init, jax.random.key(0), X)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(
    "way",
    [linen, linen_served, handle, lambda config: handle(config, "convert"), lambda config: handle(config, "serve")],
    ids=["linen", "linen_served", "handle", "handle_convert", "handle_serve"],
)
def test_it_reaches_every_op(way, implementation, asked):
    way({"quantization": "fp8_current", "implementation": implementation})
    assert set(asked) == {("dot_general", implementation)}  # an einsum is one


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": "aqt_fp8"}, "implementation 'xla' is not one of quant_backend 'aqt': AQT computes its mat"),
        ({"quant_backend": "qwix"}, "not one of quant_backend 'qwix': Qwix .* at null, or use quant_backend 'native'"),
    ],
)
def test_a_backend_that_has_none(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantConfig(**{"quantization": "fp8_full", "implementation": "xla", **fields})
    QuantConfig(**{"quantization": "fp8_full", "implementation": "xla", **fields, "quant_backend": "native"})


def test_an_unknown_one_lists_what_is_known():
    with pytest.raises(ValueError, match=r"implementation must be .*'xla'.*, got 'palas'"):
        QuantConfig(quantization="fp8", implementation="palas")
