"""Quantize a function of a parameter tree, without a framework; the function scans stacked layers.

python examples/pure_jax.py
"""

import jax
import jax.numpy as jnp

import jaxquant


def loss(params, x, y):
    """A residual network whose layers are stacked and scanned."""

    def layer(x, kernels):
        return x + jnp.tanh(x @ kernels["up"]) @ kernels["down"], None

    x, _ = jax.lax.scan(layer, x @ params["input"], params["layers"])
    return jnp.mean((x @ params["readout"] - y) ** 2)


def main(steps: int = 200, width: int = 64, quantization: str = "fp8", learning_rate: float = 0.01) -> float:
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "input": jax.random.normal(keys[0], (16, width)) / 4,
        "layers": {
            "up": jax.random.normal(keys[1], (3, width, 2 * width)) / width**0.5,
            "down": jax.random.normal(keys[2], (3, 2 * width, width)) / (2 * width) ** 0.5,
        },
        "readout": jax.random.normal(keys[3], (width, 1)) / width**0.5,
    }
    x = jax.random.normal(keys[4], (64, 16))
    y = jnp.sin(x.sum(-1, keepdims=True))

    config = {"quantization": quantization, "rules": [{"path": "readout", "recipe": None}]}
    quantized = jaxquant.quantize(loss, config)
    print(quantized.report(params, x, y))
    quant_state = quantized.init(params, x, y)

    @jax.jit
    def step(params, quant_state, key):
        take = jax.value_and_grad(quantized, argnums=(0, 1))
        value, (grads, observation) = take(params, quant_state, x, y, key=key)
        params = jax.tree.map(lambda p, g: p - learning_rate * g, params, grads)
        return params, jaxquant.state.update(quant_state, observation), value

    for i in range(steps):
        params, quant_state, value = step(params, quant_state, jax.random.key(i))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i}: loss {value:.4f}")
    assert jnp.isfinite(value), f"the loss is {value}"
    return float(value)


if __name__ == "__main__":
    main()
