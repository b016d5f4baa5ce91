"""Quant state is correct: properties 1 to 6 and 9. Each check fails if its property is broken on purpose."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxquant
from jaxquant import state
from jaxquant.core import delayed
from tests.must_hold.broken import fails_when_broken
from tests.must_hold.loop import LENGTH, WEIGHTS, PythonLoop, amax, inputs, op_state
from tests.states import assert_same_state

CONFIG = {"quantization": "fp8", "amax_history_length": LENGTH}
OWG = state.OVERWRITE_WITH_GRADIENT


class Twice(nn.Module):
    """One layer, called for each of three inputs; ``how`` selects the transformation that calls it."""

    how: str = "calls"

    @nn.compact
    def __call__(self, xs: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, 8, use_bias=False, name="dense")
        if self.how == "calls":
            layer = dense()
            return jnp.stack([layer(x) for x in xs])
        if self.how == "remat":
            layer = nn.remat(nn.Dense)(8, use_bias=False, name="dense")
            return jnp.stack([layer(x) for x in xs])
        if self.how == "scan":
            scan = nn.scan(
                lambda layer, carry, x: (carry, layer(x)),
                variable_broadcast=["params", OWG],
                split_rngs={"params": False},
            )
            return scan(dense(), None, xs)[1]
        vmap = nn.vmap(
            lambda layer, x: layer(x), variable_axes={"params": None, OWG: None}, split_rngs={"params": False}
        )
        return vmap(dense(), xs)


class One(nn.Module):
    """One layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, use_bias=False, name="dense", dtype=x.dtype)(x)


def build(model: nn.Module, x: jax.Array):
    model = jaxquant.maybe_quantize_model(model, CONFIG, x)
    return model, jax.jit(model.init)(jax.random.key(0), x)


def weighted(ys: jax.Array) -> jax.Array:
    return sum(weight * y.astype(jnp.float32).sum() for weight, y in zip(WEIGHTS, ys, strict=True))


def run(loss, variables, steps: int = 3):
    """Differentiate and update quant state step by step, with constant parameters; yield the op's state after each."""
    params, quant = state.split(variables)

    @jax.jit
    def advance(quant, xs):
        return state.update(quant, jax.grad(lambda q: loss(state.merge(params, q), xs))(quant))

    for step in range(steps):
        quant = advance(quant, inputs(step))
        yield op_state(quant)


def kernel_of(variables) -> jax.Array:
    return variables["params"]["dense"]["kernel"]


# -- 1: reuse ---------------------------------------------------------------------------------------------------------


def check_reuse(how: str) -> None:
    if how == "vmap of apply":
        model, variables = build(One(), inputs(0)[0])
        apply = lambda v, xs: jax.vmap(lambda x: model.apply(v, x))(xs)  # noqa: E731
    elif how == "pipeline":  # each stage of a pipeline receives one micro-batch in each iteration of a loop
        model, variables = build(One(), inputs(0)[0])
        apply = lambda v, xs: jax.lax.scan(lambda c, x: (c, model.apply(v, x)), None, xs)[1]  # noqa: E731
    else:
        model, variables = build(Twice(how), inputs(0))
        apply = model.apply
    expected = PythonLoop()
    for step, quant in enumerate(run(lambda v, xs: weighted(apply(v, xs)), variables)):
        expected.step(
            input=[amax(x) for x in inputs(step)], kernel=[amax(kernel_of(variables))] * 3, output_grad=WEIGHTS
        )
        expected.check(quant)


@pytest.mark.parametrize("how", ["calls", "scan", "vmap", "remat", "vmap of apply", "pipeline"])
def test_1_reuse_takes_the_maximum(how):
    check_reuse(how)


# -- 2: gradient accumulation -----------------------------------------------------------------------------------------


def check_accumulation(how: str) -> None:
    """Compare micro-batches of different magnitudes with one large batch, for three optimizer steps."""
    model, variables = build(One(), inputs(0)[0])

    def loss(v, xs):
        return weighted(jax.vmap(lambda x: model.apply(v, x))(xs))

    def micro(v, x, weight):
        return (weight * model.apply(v, x)).sum()

    grad, whole = jax.jit(jax.grad(micro)), jax.jit(jax.grad(loss))
    expected, params = PythonLoop(), variables["params"]
    big, accumulated = variables, variables
    tx = optax.MultiSteps(optax.sgd(0.0), 3)
    train_state = state.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    optimizer = state.Optimizer(tx)
    opt_state = optimizer.init(variables)
    step_fn = jax.jit(optimizer.step)
    for step in range(3):
        xs = inputs(step)
        expected.step(input=[amax(x) for x in xs], kernel=[amax(kernel_of(variables))] * 3, output_grad=WEIGHTS)
        big = state.merge(params, state.update(big[OWG], whole(big, xs)[OWG]))
        if how in ("accumulate", "sum", "mean"):
            seen = [grad(accumulated, x, weight)[OWG] for x, weight in zip(xs, WEIGHTS, strict=True)]
            if how == "accumulate":
                total = functools.reduce(state.accumulate, seen, state.no_observation(accumulated[OWG]))
            else:
                total = jax.tree.map(lambda *leaves: sum(leaves) / (3 if how == "mean" else 1), *seen)
            accumulated = state.merge(params, state.update(accumulated[OWG], total))
        elif how == "lax.scan":

            def add(total, item, variables=accumulated):
                return state.accumulate(total, jax.grad(micro)(variables, *item)[OWG]), None

            total, _ = jax.lax.scan(add, state.no_observation(accumulated[OWG]), (xs, jnp.array(WEIGHTS)))
            accumulated = state.merge(params, state.update(accumulated[OWG], total))
        else:
            for x, weight in zip(xs, WEIGHTS, strict=True):
                if how == "MultiSteps":
                    accumulated, opt_state = step_fn(grad(accumulated, x, weight), opt_state, accumulated)
                else:
                    train_state = train_state.apply_gradients(grads=grad(train_state.params, x, weight))
                    accumulated = train_state.params
        expected.check(op_state(accumulated[OWG]))
        jax.tree.map(np.testing.assert_array_equal, accumulated["params"], big["params"])
        assert_same_state(accumulated[OWG], big[OWG])


@pytest.mark.parametrize("how", ["accumulate", "sum", "mean", "lax.scan", "MultiSteps", "TrainState"])
def test_2_micro_batches_leave_the_state_of_the_big_batch(how):
    check_accumulation(how)


# -- 3: a layer without a gradient ------------------------------------------------------------------------------------


def check_unused(how: str) -> None:
    """Run one step with the layer, one without it, and one with it."""
    model, variables = build(One(), inputs(0)[0])
    params, quant = state.split(variables)

    def loss(quant, x, is_used):
        apply = lambda x: model.apply(state.merge(params, quant), x)  # noqa: E731
        if how == "cond":
            y = jax.lax.cond(is_used, apply, lambda x: x, x)
        elif is_used:
            y = apply(x)
        else:
            y = jax.lax.stop_gradient(apply(x)) if how == "stop_gradient" else x
        return y.sum()

    expected = PythonLoop()
    static = () if how == "cond" else (2,)
    step = jax.jit(lambda q, x, used: state.update(q, jax.grad(loss)(q, x, used)), static_argnums=static)
    for index, used in enumerate((True, False, True)):
        x = inputs(index)[0]
        quant = step(quant, x, used)
        if used:
            expected.step(input=[amax(x)], kernel=[amax(kernel_of(variables))], output_grad=[1.0])
        expected.check(op_state(quant))
    assert amax(model.apply(state.merge(params, quant), x)) > 0


@pytest.mark.parametrize("how", ["cond", "stop_gradient", "not called"])
def test_3_a_layer_without_gradient_keeps_its_state(how):
    check_unused(how)


def check_unused_in_flax_mode() -> None:
    model = jaxquant.maybe_quantize_model(One(), CONFIG | {"amax_init": "flax"}, inputs(0)[0])
    params, quant = state.split(jax.jit(model.init)(jax.random.key(0), inputs(0)[0]))
    kept = state.update(quant, jax.tree.map(jnp.zeros_like, quant))
    jax.tree.map(np.testing.assert_array_equal, kept, quant)
    assert amax(model.apply(state.merge(params, kept), inputs(0)[0])) > 0


def test_3_in_flax_mode_too():
    check_unused_in_flax_mode()


# -- 4: a non-finite amax ---------------------------------------------------------------------------------------------


def check_non_finite() -> None:
    model, variables = build(One(), inputs(0)[0])
    params, quant = state.split(variables)

    @jax.jit
    def step(quant, x):
        y, seen = jax.value_and_grad(lambda q: model.apply(state.merge(params, q), x).sum())(quant)
        return y, state.update(quant, seen)

    expected = PythonLoop()
    for index, poison in enumerate((0.0, np.inf, np.nan, -np.inf, 0.0, 0.0)):
        x = inputs(index)[0] if poison == 0 else inputs(index)[0].at[1, 2].set(poison)
        y, quant = step(quant, x)
        expected.step(input=[float(jnp.max(jnp.abs(x)))], kernel=[amax(kernel_of(variables))], output_grad=[1.0])
        expected.check(op_state(quant))
    assert np.isfinite(y)


def test_4_a_non_finite_amax_is_not_recorded():
    check_non_finite()


# -- 5: the first step ------------------------------------------------------------------------------------------------


def check_first_step() -> None:
    """Inputs of about 2000 and gradients of 1e-7 have only the rounding errors of e4m3 and e5m2 in a sum of eight."""
    model, variables = build(One(), inputs(0)[0])
    x = 2000.0 + 100 * inputs(0)[0]
    kernel = kernel_of(variables)

    def loss(v, x):
        return 1e-7 * model.apply(v, x).sum()

    y, (grads, dx) = model.apply(variables, x), jax.grad(loss, argnums=(0, 1))(variables, x)
    # Half an ulp of each of two e4m3 operands, 2^-4 + 2^-4. The gradient, 1e-7, is the amax and exact.
    bound = 2.0**-3 * (jnp.abs(x) @ jnp.abs(kernel))
    assert (jnp.abs(y - x @ kernel) <= bound).all()
    np.testing.assert_allclose(
        grads["params"]["dense"]["kernel"], 1e-7 * x.sum(0)[:, None] * jnp.ones((1, 8)), rtol=2.0**-4
    )
    exact = 1e-7 * kernel.sum(1) * jnp.ones((4, 1))
    assert (jnp.abs(dx - exact) <= 2.0**-4 * 1e-7 * jnp.abs(kernel).sum(1)).all()


def test_5_the_first_step_neither_clips_nor_flushes():
    check_first_step()


# -- 6: changes of gradients -----------------------------------------------------------------------------------------


def check_untouched(how: str) -> None:
    """Clipping, decay, EMA, casts and skipped spikes, in ``Optimizer`` and ``TrainState``, keep the state correct."""
    transforms = {
        "clip": optax.clip_by_global_norm(1e-9),
        "decay": optax.add_decayed_weights(0.5),
        "ema": optax.ema(0.9),
        "cast": optax.stateless(lambda updates, _: jax.tree.map(lambda g: g.astype(jnp.bfloat16), updates)),
        "skip": optax.apply_if_finite(optax.identity(), 5),
    }
    model, variables = build(One(), inputs(0)[0])
    tx = optax.chain(transforms[how], optax.scale(0.0))
    train_state = state.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    optimizer = state.Optimizer(tx)
    opt_state, current = optimizer.init(variables), variables
    grad = jax.jit(jax.grad(lambda v, x: (3.0 * model.apply(v, x)).sum()))
    expected = PythonLoop()
    for index in range(3):
        x = inputs(index)[0]
        current, opt_state = optimizer.step(grad(current, x), opt_state, current)
        train_state = train_state.apply_gradients(grads=grad(train_state.params, x))
        expected.step(input=[amax(x)], kernel=[amax(kernel_of(variables))], output_grad=[3.0])
        expected.check(op_state(current[OWG]))
        expected.check(op_state(train_state.params[OWG]))
    assert int(train_state.step) == 3


@pytest.mark.parametrize("how", ["clip", "decay", "ema", "cast", "skip"])
def test_6_what_is_done_to_gradients_never_sees_the_state(how):
    check_untouched(how)


def test_6_a_gradient_without_quant_state_is_an_error():
    model, variables = build(One(), inputs(0)[0])
    optimizer = state.Optimizer(optax.sgd(0.1))
    with state.frozen():
        grads = jax.grad(lambda p: model.apply(variables | {"params": p}, inputs(0)[0]).sum())(variables["params"])
    with pytest.raises(ValueError, match="but the gradient does not; differentiate with respect to all variables"):
        optimizer.step({"params": grads}, optimizer.init(variables), variables)


# -- 9: remat, saving, fp16 -------------------------------------------------------------------------------------------


def check_saving(folder) -> None:
    model, variables = build(One(), inputs(0)[0])
    *_, quant = run(lambda v, xs: weighted(jax.vmap(lambda x: model.apply(v, x))(xs)), variables)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", quant)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(folder / "state", jax.tree.map(jnp.zeros_like, quant))
    jax.tree.map(np.testing.assert_array_equal, restored, quant)


def test_9_saving_and_restoring_loses_no_bit(tmp_path):
    check_saving(tmp_path)


def check_float16() -> None:
    """The unscaled sum of 300 products of 20 · 20 exceeds the largest float16, 65504; the scaled result does not."""
    x, kernel = jnp.full((2, 300), 20.0, jnp.float16), jnp.full((300, 4), 0.05, jnp.float16)

    def loss(x, kernel, quant):
        numbers = (((1,), (0,)), ((), ()))
        y = jaxquant.ops.dot_general(x, kernel, numbers, recipe=jaxquant.RECIPES["fp8"].recipe, state=quant)
        return y.astype(jnp.float32).sum(), y

    quant = jaxquant.ops.initial_state(jaxquant.RECIPES["fp8"].recipe)
    (dx, dkernel), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, kernel, quant)
    assert y.dtype == dx.dtype == dkernel.dtype == jnp.float16
    # Every operand is one number, the amax of its tensor: exact in e4m3 and e5m2 but for the rounding to fp16.
    np.testing.assert_allclose(y.astype(jnp.float32), 300.0, rtol=2.0**-9)
    np.testing.assert_allclose(dx.astype(jnp.float32), 0.2, rtol=2.0**-9)
    np.testing.assert_allclose(dkernel.astype(jnp.float32), 40.0, rtol=2.0**-9)


def test_9_float16_is_accumulated_and_rescaled_in_float32():
    check_float16()


# -- broken on purpose ------------------------------------------------------------------------------------------------


def _mean_of_uses(seen):
    count = seen["amax_bins"][..., 0, : delayed.NON_FINITE_BIN]
    values = delayed.bin_value(jnp.arange(delayed.NON_FINITE_BIN))
    total = count.sum(-1)
    return jnp.where(total > 0, (count * values).sum(-1) / jnp.where(total > 0, total, 1.0), -1.0)


def _zero_where_unused(seen, largest=delayed.largest_amax):
    return jnp.maximum(largest(seen), 0.0)


def _record_non_finite(old, scale, amax, spec, observe=delayed.observe):
    return observe(old, scale, jnp.where(jnp.isfinite(amax), amax, 3e38), spec)


def _no_warm_up(old, amax, element, spec, current_scale=delayed.current_scale, **options):
    return current_scale(old, jnp.zeros_like(amax), element, spec, **options)


def _record_twice(history, amax, record=delayed.record):
    return record(record(history, amax), amax)


BROKEN = {
    "uses are averaged": (delayed, "largest_amax", _mean_of_uses, lambda: check_reuse("calls")),
    "uses are averaged, scan": (delayed, "largest_amax", _mean_of_uses, lambda: check_reuse("scan")),
    "the last micro-batch wins": (
        state,
        "accumulate",
        lambda total, seen: seen,
        lambda: check_accumulation("accumulate"),
    ),
    "every micro-batch is a step": (
        state.optimizer,
        "multi_steps",
        lambda _: [],
        lambda: check_accumulation("MultiSteps"),
    ),
    "every micro-batch is a step, TrainState": (
        state.optimizer,
        "multi_steps",
        lambda _: [],
        lambda: check_accumulation("TrainState"),
    ),
    "no gradient is an amax of 0": (delayed, "largest_amax", _zero_where_unused, lambda: check_unused("cond")),
    "no gradient is an amax of 0, frozen": (
        delayed,
        "largest_amax",
        _zero_where_unused,
        lambda: check_unused("stop_gradient"),
    ),
    "flax mode overwrites what was not used": (state, "update", lambda old, seen: seen, check_unused_in_flax_mode),
    "a non-finite amax is recorded": (delayed, "observe", _record_non_finite, check_non_finite),
    "the first step has scale 1": (delayed, "current_scale", _no_warm_up, check_first_step),
    "the optimizer steps the state": (
        state.optimizer,
        "update",
        lambda old, seen: jax.tree.map(lambda value, grad: value - 0.0 * grad, old, seen),
        lambda: check_untouched("clip"),
    ),
    "recomputation records again": (delayed, "record", _record_twice, lambda: check_reuse("remat")),
    "fp16 accumulates in fp16": (
        jaxquant.ops.contract,
        "accumulator_dtype",
        lambda asked, out: asked or out,
        check_float16,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_property_is_seen(name):
    fails_when_broken(*BROKEN[name])
