"""A model that passes a quantization handle to its layers, as MaxText does: train, convert and serve with one handle.

python examples/maxtext_handle.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxquant
from jaxquant.compat import maxtext


class DenseGeneral(nn.Module):
    """A linear layer with the quantization handle as a field."""

    features: int
    quant: Any = None

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        if maxtext.in_serve_mode(self.quant):
            kernel = jnp.zeros(shape, x.dtype)  # replaced by the converted kernel
        else:
            kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        dot_general = self.quant.dot_general_cls()() if self.quant else jax.lax.dot_general
        return dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class Model(nn.Module):
    """Two ``DenseGeneral`` layers."""

    quant: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(DenseGeneral(64, self.quant, name="wi")(x))
        return DenseGeneral(8, self.quant, name="wo")(x)


def main(steps: int = 100, quantization: str = "int8") -> float:
    config = jaxquant.QuantConfig(quantization=quantization, quant_backend="native")
    x = jax.random.normal(jax.random.key(0), (32, 16))
    y = jnp.tanh(x[:, :8])
    quant = maxtext.configure_quantization(config)
    model = Model(quant)
    state = jaxquant.state.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(1), x), tx=optax.adam(1e-2)
    )
    quant.check_used()  # raises if a rule matched no layer

    @jax.jit
    def step(state, key):
        def loss(variables):
            return ((state.apply_fn(variables, x, rngs={"quant": key}) - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    for i in range(steps):
        state, value = step(state, jax.random.key(i))
    print(f"loss {value:.4f}")

    convert = Model(maxtext.configure_quantization(config, "convert"))
    _, made = jax.jit(lambda variables: convert.apply(variables, x, mutable=["aqt"]))(state.params)
    served = {"params": maxtext.remove_quantized_params(state.params["params"], made["aqt"]), "aqt": made["aqt"]}
    serve = Model(maxtext.configure_quantization(config, "serve"))
    same = jnp.array_equal(jax.jit(serve.apply)(served, x), jax.jit(model.apply)(state.params, x))
    print(f"served as trained, bit for bit: {bool(same)}")
    assert jnp.isfinite(value), f"the loss is {value}"
    return float(value)


if __name__ == "__main__":
    main()
