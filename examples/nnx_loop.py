"""Training loop of a Flax NNX model with nnx.Optimizer, which also updates quant state.

python examples/nnx_loop.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxquant


class Model(nnx.Module):
    """A small classifier without quantization code."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.wi = nnx.Linear(16, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.wo = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.wo(self.norm(nnx.gelu(self.wi(x))))))


def main(steps: int = 200, width: int = 64, quantization: str = "fp8") -> float:
    x = jax.random.normal(jax.random.key(0), (64, 16))
    labels = jnp.argmax(x[:, :4], -1)
    model = jaxquant.maybe_quantize_model(Model(width, nnx.Rngs(1)), {"quantization": quantization}, x)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def loss(model, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

    @nnx.jit
    def step(model, optimizer, x, labels):
        value, grads = jaxquant.state.value_and_grad(loss)(model, x, labels)
        norm = optax.global_norm(grads.params)  # only gradients of parameters
        jaxquant.state.apply_gradients(model, optimizer, grads)
        return value, norm

    for i in range(steps):
        value, norm = step(model, optimizer, x, labels)
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i}: loss {value:.4f}, gradient norm {norm:.3f}")

    # A checkpoint must store the parameters and the quant state, which is a separate Variable type.
    params, quant_state = nnx.state(model, nnx.Param), nnx.state(model, jaxquant.state.QuantState)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, quant_state)]
    print(f"{sizes[0]} parameters, {sizes[1]} numbers of quant state")
    assert jnp.isfinite(value), f"the loss is {value}"
    return float(value)


if __name__ == "__main__":
    main()
