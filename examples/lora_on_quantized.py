"""LoRA on a quantized base: the base layers run in int8 and are frozen, and the low-rank factors train in float.

python examples/lora_on_quantized.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxquant


class Model(nnx.Module):
    """Two layers with low-rank factors."""

    def __init__(self, width: int, rank: int, rngs: nnx.Rngs):
        self.wi = nnx.LoRA(16, rank, width, base_module=nnx.Linear(16, width, rngs=rngs), rngs=rngs)
        self.wo = nnx.LoRA(width, rank, 4, base_module=nnx.Linear(width, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.wo(nnx.gelu(self.wi(x)))


def main(steps: int = 200, width: int = 64, quantization: str = "int8") -> float:
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.tanh(x[:, :4])
    plain, config = Model(width, 4, nnx.Rngs(1)), {"quantization": quantization}
    for layer in jaxquant.describe_layers(plain, config, x):
        print(f"{layer.path:16} {layer.recipe or 'float':6} {layer.reason}")
    model = jaxquant.maybe_quantize_model(plain, config, x)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    before = jax.tree.map(jnp.copy, nnx.state(model.wi.base_module, nnx.Param))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return ((model(x) - y) ** 2).mean()

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    for i in range(steps):
        value = step(model, optimizer)
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i}: loss {value:.4f}")
    after = nnx.state(model.wi.base_module, nnx.Param)
    same = all(jax.tree.leaves(jax.tree.map(jnp.array_equal, before, after)))
    print(f"the base is unchanged: {same}")
    assert jnp.isfinite(value), f"the loss is {value}"
    return float(value)


if __name__ == "__main__":
    main()
