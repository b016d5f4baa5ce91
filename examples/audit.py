"""Audit a training step without its chip: coverage of the traced step, then an audit of the compiled step.

pip install -e '.[audit-gpu,audit-tpu]'     # the compilers (1 GB); no accelerator is needed
python examples/audit.py h200 v6e
"""

import sys

import jax
import optax
from flax import linen as nn

import jaxquant


def main(targets: tuple[str, ...] = ("h200",), width: int = 1024, quantization: str = "fp8") -> str:
    x = jax.ShapeDtypeStruct((4096, width), "bfloat16")
    plain = nn.Sequential([nn.Dense(4 * width, dtype="bfloat16"), nn.gelu, nn.Dense(width, dtype="bfloat16")])
    config = {"quantization": quantization}
    model = jaxquant.maybe_quantize_model(plain, config, x)

    def create():
        params = model.init(jax.random.key(0), jax.numpy.zeros(x.shape, x.dtype))
        return jaxquant.state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    state = jax.eval_shape(create)  # only shapes; nothing is computed

    @jax.jit
    def step(state, x):
        def loss(variables):
            return (state.apply_fn(variables, x).astype("float32") ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    found = jaxquant.coverage(step, state, x)
    found.check()  # raises if a matmul is not quantized as requested
    print(found)
    for target in targets:
        print(jaxquant.aot.audit(step, state, x, target=target).to_markdown())
    return found.summary()


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or ("h200",))
