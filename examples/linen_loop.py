"""Training loop of a Flax Linen model with optax: clipping, weight decay, micro-batches, fp8 with delayed scaling.

python examples/linen_loop.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxquant


class Block(nn.Module):
    """A residual block without quantization code."""

    width: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        y = nn.gelu(nn.Dense(4 * self.width, name="wi")(y))
        return x + nn.Dense(self.width, name="wo")(y)


class Model(nn.Module):
    """Two blocks and a head that stays in float because of its name."""

    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name="input")(x)
        for i in range(2):
            x = Block(self.width, name=f"layers_{i}")(x)
        return nn.Dense(1, name="head")(x)


def main(steps: int = 200, width: int = 64, quantization: str = "fp8") -> float:
    x = jax.random.normal(jax.random.key(0), (4, 64, 16))  # four micro-batches
    y = jnp.sin(x.sum(-1, keepdims=True))
    model = jaxquant.maybe_quantize_model(Model(width), {"quantization": quantization}, x[0])

    # Clipping and weight decay apply only to parameters. With MultiSteps, quant state is updated together with the
    # parameters.
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    optimizer = jaxquant.state.Optimizer(optax.MultiSteps(inner, every_k_schedule=len(x)))
    variables = model.init(jax.random.key(1), x[0])
    opt_state = optimizer.init(variables)

    @jax.jit
    def step(variables, opt_state, x, y, key):
        def loss(variables):
            return ((model.apply(variables, x, rngs={"quant": key}) - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(variables)
        variables, opt_state = optimizer.step(grads, opt_state, variables)
        return variables, opt_state, value

    for i in range(steps):
        for j in range(len(x)):
            key = jax.random.fold_in(jax.random.key(2), len(x) * i + j)
            variables, opt_state, value = step(variables, opt_state, x[j], y[j], key)
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i}: loss {value:.4f}")
    print(jaxquant.coverage(step, variables, opt_state, x[0], y[0], jax.random.key(0)))
    assert jnp.isfinite(value), f"the loss is {value}"
    return float(value)


if __name__ == "__main__":
    main()
