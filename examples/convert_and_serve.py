"""Train, convert, save, load and serve a quantized model; then quantize a model that was trained in float.

python examples/convert_and_serve.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxquant

CONFIG = {"quantization": "fp8"}


def main(steps: int = 100, width: int = 64) -> float:
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.tanh(x[:, :4])
    plain = nn.Sequential([nn.Dense(width), nn.gelu, nn.Dense(4)])
    model = jaxquant.maybe_quantize_model(plain, CONFIG, x)
    state = jaxquant.state.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(1), x), tx=optax.adam(1e-2)
    )

    @jax.jit
    def step(state):
        value, grads = jax.value_and_grad(lambda v: ((state.apply_fn(v, x) - y) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), value

    for _ in range(steps):
        state, value = step(state)
    print(f"trained: loss {value:.4f}")

    served = jaxquant.convert(plain, state.params, CONFIG, x)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "served"
        jaxquant.serving.save(path, served["params"], CONFIG)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        loaded = jaxquant.serving.load(path)
    serving = jaxquant.maybe_quantize_model(plain, loaded.config | {"checkpoint_is_quantized": True}, x)
    out = jax.jit(serving.apply)({"params": loaded.params}, x)
    same = jnp.array_equal(out, jax.jit(model.apply)(state.params, x))
    print(f"served from {size} bytes; as trained, bit for bit: {bool(same)}")

    # A model that was trained in float: delayed scaling needs calibration on real inputs for its static scales.
    floats = {"params": state.params["params"]}
    calibrated = jaxquant.calibrate(plain, floats, CONFIG, [x[:32], x[32:]])
    after = jaxquant.convert(plain, calibrated, CONFIG, x)
    out = jax.jit(serving.apply)(after, x)
    calibrated_loss = ((out - y) ** 2).mean()
    print(f"calibrated after training: loss {calibrated_loss:.4f}")
    assert jnp.isfinite(value + calibrated_loss), f"the losses are {value} and {calibrated_loss}"
    return float(value)


if __name__ == "__main__":
    main()
