"""native fp8 in flax mode compared with flax's own op, bit for bit.

In bfloat16, XLA:CPU may leave out the rounding of a product that is then cast to float32 ("excess precision"),
depending on where the product is in the program. The product of a gradient matmul with its scales is affected.
Therefore the bfloat16 comparison compiles both programs without excess precision; float32 has no such rounding.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jaxquant import maybe_quantize_model, state
from jaxquant.state import OVERWRITE_WITH_GRADIENT
from tests.states import nested, recorded


class Model(nn.Module):
    dot_general_cls: type | None = None
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        kwargs = {"dot_general_cls": self.dot_general_cls, "dtype": self.dtype}
        x = nn.relu(nn.Dense(32, **kwargs)(x))
        x = nn.DenseGeneral((4, 8), **kwargs)(x)
        return nn.DenseGeneral(16, axis=(-2, -1), use_bias=False, **kwargs)(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_steps_are_bit_identical_state_included(dtype):
    x = jax.random.normal(jax.random.key(0), (12, 24))
    config = {"quantization": "fp8", "amax_init": "flax", "amax_history_length": 16}

    class Op(nn.Fp8DirectDotGeneralOp):
        amax_history_length: int = 16

    Op.__name__ = "Fp8DirectDotGeneralOp"
    models = [Model(Op, dtype), maybe_quantize_model(Model(dtype=dtype), config, x)]
    states = []
    for model in models:
        variables = jax.jit(model.init)(jax.random.key(1), x)
        states.append(TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2)))

    def train_step(train_state, x):
        def loss(variables):
            return ((train_state.apply_fn(variables, x) - x[:, :16]) ** 2).mean().astype(jnp.float32)

        value, grads = jax.value_and_grad(loss)(train_state.params)
        return train_state.apply_gradients(grads=grads), value

    step = jax.jit(train_step, compiler_options={"xla_allow_excess_precision": False} if dtype == "bfloat16" else None)
    for i in range(50):
        batch = x * (1 + i % 7)
        outcomes = [step(s, batch) for s in states]
        states = [s for s, _ in outcomes]
        assert outcomes[0][1] == outcomes[1][1], f"loss differs at step {i}"
    ours = {**states[1].params, OVERWRITE_WITH_GRADIENT: nested(states[1].params[OVERWRITE_WITH_GRADIENT])}
    jax.tree.map(np.testing.assert_array_equal, states[0].params, ours)
    history = ours[OVERWRITE_WITH_GRADIENT]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    assert (history > 0).all()


def test_a_flax_checkpoint_goes_on_in_either_mode():
    x = jax.random.normal(jax.random.key(0), (12, 24))
    flax_model = Model(nn.Fp8DirectDotGeneralOp)
    variables = jax.jit(flax_model.init)(jax.random.key(1), x)
    grads = jax.jit(jax.grad(lambda v: (flax_model.apply(v, x) ** 2).mean()))(variables)
    params, saved = variables["params"], grads[OVERWRITE_WITH_GRADIENT]
    out = jax.jit(flax_model.apply)({"params": params, OVERWRITE_WITH_GRADIENT: saved}, x)
    for mode in ("flax", "warmup"):
        model = maybe_quantize_model(Model(), {"quantization": "fp8", "amax_init": mode}, x)
        quant = state.from_flax(saved, like=state.split(jax.eval_shape(model.init, jax.random.key(1), x))[1])
        ours = jax.jit(model.apply)(state.merge(params, quant), x)
        # Only the formula of the scale differs, 1 / (max / a) and a / max: a last bit, which can change a rounding.
        np.testing.assert_allclose(ours, out, atol=0 if mode == "flax" else float(jnp.abs(out).max()) / 16)
        seen = jax.jit(jax.grad(lambda q, m=model: (m.apply(state.merge(params, q), x) ** 2).mean()))(quant)
        history = state.rows_of(state.update(quant, seen))["Dense_0/Fp8DirectDotGeneralOp_0/input"]["amax_history"]
        amax = jnp.abs(x).max()
        np.testing.assert_array_equal(history[-1], amax)  # in flax's layout
        np.testing.assert_array_equal(history[0], amax if mode == "flax" else recorded(amax))
    model = maybe_quantize_model(Model(), {"quantization": "fp8"}, x)
    with pytest.raises(ValueError, match=r"no 'input_\w+' in that collection; .* with jaxquant\.state\.from_flax"):
        model.apply({"params": params, OVERWRITE_WITH_GRADIENT: saved}, x)
