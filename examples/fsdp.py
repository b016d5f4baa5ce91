"""FSDP over eight simulated CPU devices: each device quantizes its shard of every kernel before the all-gather.

python examples/fsdp.py
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxquant


def train(devices: int, steps: int, width: int, quantization: str) -> list[float]:
    """Train on a number of devices and return the losses."""
    mesh = Mesh(jax.devices()[:devices], ("fsdp",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (64, width))
    y = jnp.sin(x[:, :8])
    plain = nn.Sequential([nn.Dense(4 * width), nn.gelu, nn.Dense(width), nn.gelu, nn.Dense(8)])
    model = jaxquant.maybe_quantize_model(plain, {"quantization": quantization}, x)
    state = jaxquant.state.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(1), x), tx=optax.adam(1e-3)
    )

    def sharding(leaf):  # shards kernels by rows, replicates other arrays
        is_kernel = leaf.ndim == 2 and leaf.shape[0] % devices == 0
        return NamedSharding(mesh, PartitionSpec("fsdp") if is_kernel else PartitionSpec())

    state = jax.device_put(state, jax.tree.map(sharding, jax.tree.map(jnp.asarray, state)))
    x, y = jax.device_put((x, y), NamedSharding(mesh, PartitionSpec("fsdp")))

    @jax.jit
    def step(state, x, y):
        value, grads = jax.value_and_grad(lambda v: ((state.apply_fn(v, x) - y) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(steps):
        state, value = step(state, x, y)
        losses.append(float(value))
    text = step.lower(state, x, y).compile().as_text()
    print(f"{devices} devices: losses {losses[0]:.5f} to {losses[-1]:.5f}; {text.count('all-gather(')} all-gathers")
    return losses


def main(steps: int = 50, width: int = 64, quantization: str = "fp8") -> float:
    one, eight = (train(devices, steps, width, quantization) for devices in (1, 8))
    print(f"largest difference between the losses: {max(abs(a - b) for a, b in zip(one, eight, strict=True)):.2e}")
    assert jnp.isfinite(eight[-1]), f"the loss is {eight[-1]}"
    return eight[-1]


if __name__ == "__main__":
    main()
