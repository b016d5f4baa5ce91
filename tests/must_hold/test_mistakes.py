"""Property 28: four training loops, each with quant state forgotten, optimized, decayed, clipped or partly restored.

Each mistake raises an error with advice, or leaves correct numbers. ``docs/guide/loops.md`` has the table.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxquant
from jaxquant import state
from jaxquant.compat import maxtext
from jaxquant.state.table import is_tables, make_state
from tests.must_hold.broken import fails_when_broken
from tests.must_hold.loop import LENGTH, op_state
from tests.states import nested, recorded

CONFIG = {"quantization": "fp8", "amax_history_length": LENGTH}
X = jax.random.normal(jax.random.key(0), (4, 8))
LARGE = 30 * X
TRAINED = r"quant state '[\w/]*input' has negative numbers, .*jaxquant\.state\.split.*TrainState"
AS_WEIGHT = r"quant state '[\w/]*amax_history' is added to or multiplied, .*jaxquant\.state\.split"
NORM = r"observations of quant state are squared, .*jaxquant\.state\.split\(grads\)\[0\]"


class Linen:
    """A Linen model, its variables, and its loss as a function of (parameters, quant state)."""

    def __init__(self) -> None:
        self.model: Any = jaxquant.maybe_quantize_model(nn.Dense(8, use_bias=False), CONFIG, X)
        self.params, self.state = state.split(self.model.init(jax.random.key(1), X))

    def __call__(self, params: Any, quant_state: Any, x: jax.Array) -> jax.Array:
        return (self.model.apply(state.merge(params, quant_state), x) ** 2).mean()


class Handle(Linen):
    """A Linen model that passes the op of ``configure_quantization`` to its layers by hand, as MaxText's models do."""

    def __init__(self) -> None:
        op = maxtext.configure_quantization(CONFIG).dot_general_cls()
        self.model = nn.Dense(8, use_bias=False, dot_general_cls=op)
        self.params, self.state = state.split(self.model.init(jax.random.key(1), X))


class Function(Linen):
    """A plain function of parameters."""

    def __init__(self) -> None:
        self.model = jaxquant.quantize(lambda params, x: x @ params["kernel"], CONFIG)
        self.params = {"kernel": jax.random.normal(jax.random.key(1), (8, 8))}
        self.state = self.model.init(self.params, X)

    def __call__(self, params: Any, quant_state: Any, x: jax.Array) -> jax.Array:
        return (self.model(params, quant_state, x) ** 2).mean()


class OfNnx(Linen):
    """An NNX model, whose gradients the caller computes by hand."""

    def __init__(self) -> None:
        plain = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(1))
        self.model = jaxquant.maybe_quantize_model(plain, CONFIG, X)
        _, params, quant_state = nnx.split(self.model, nnx.Param, state.QuantState)
        self.params, self.state = nnx.to_pure_dict(params), nnx.to_pure_dict(quant_state)

    def __call__(self, params: Any, quant_state: Any, x: jax.Array) -> jax.Array:
        model = nnx.clone(self.model)
        nnx.update(model, params)
        nnx.update(model, quant_state)
        with state.by_hand():
            return (model(x) ** 2).mean()


LOOPS = {"Linen": Linen, "function": Function, "NNX": OfNnx, "handle": Handle}


@functools.cache
def made(loop: str) -> Linen:
    return LOOPS[loop]()


def gradients(loop: Linen, params: Any, quant_state: Any, x: jax.Array) -> Any:
    return jax.grad(loop, argnums=(0, 1))(params, quant_state, x)


def check_forgotten(loop: Linen) -> None:
    """A gradient without quant state is an error, also in jit. With frozen state, it equals the full gradient."""
    of_params = jax.jit(jax.grad(lambda params: loop(params, loop.state, X)))
    with pytest.raises(ValueError, match=r"is taken with respect to the kernel but not the quant state; .*frozen"):
        of_params(loop.params)
    with pytest.raises(ValueError, match=r"passes through the layer but leaves out the quant state; .*frozen"):
        jax.grad(lambda x: loop(loop.params, loop.state, x))(X)
    with state.frozen():
        found = of_params(loop.params)
        assert loop(loop.params, loop.state, X) > 0
    jax.tree.map(np.testing.assert_array_equal, found, gradients(loop, loop.params, loop.state, X)[0])
    with pytest.raises(ValueError, match="would never be updated"):
        of_params(loop.params)

    def dropped(params: Any, quant_state: Any) -> Any:
        return gradients(loop, params, quant_state, X)[0], quant_state

    with pytest.raises(ValueError, match=r"is differentiated, but its quant state does not advance; .*state.update"):
        jaxquant.coverage(dropped, loop.params, loop.state).check()

    def frozen(params: Any, quant_state: Any) -> Any:
        with state.frozen():
            return jax.grad(loop)(params, quant_state, X), quant_state

    found = jaxquant.coverage(frozen, loop.params, loop.state)
    found.check()
    assert len(found.frozen) == 1
    assert "quant state frozen on purpose" in str(found)


def check_optimized(loop: Linen) -> None:
    """An optimizer of all variables is an error. By hand, ``check`` raises it, and in jit the next loss is NaN."""
    for tx in (optax.adam(1e-2), optax.sgd(0.1)):

        def by_optax(variables: Any, opt_state: Any, tx: Any = tx) -> Any:
            value, grads = jax.value_and_grad(lambda both: loop(*both, X))(variables)
            updates, opt_state = tx.update(grads, opt_state, variables)
            return optax.apply_updates(variables, updates), opt_state, value

        @jax.jit
        def step(variables: Any, opt_state: Any, tx: Any = tx) -> Any:
            value, grads = jax.value_and_grad(lambda both: loop(*both, X))(variables)
            updates, opt_state = tx.update(grads, opt_state, variables)
            return jax.tree.map(jnp.add, variables, updates), opt_state, value

        start = (loop.params, warmed(loop))
        with pytest.raises(ValueError, match=r"updates quant state, such as '.*input', .*jaxquant\.state\.split"):
            jax.jit(by_optax)(start, tx.init(start))
        with pytest.raises(ValueError, match=AS_WEIGHT):
            jaxquant.coverage(step, start, tx.init(start)).check()
        variables, opt_state, value = step(start, tx.init(start))
        assert np.isfinite(value)
        assert np.isnan(step(variables, opt_state)[2])
        with pytest.raises(ValueError, match=TRAINED):
            loop(*variables, X)
        with pytest.raises(ValueError, match=TRAINED):
            state.Optimizer(tx).init(state.merge(*variables))


def check_decayed(loop: Linen) -> None:
    """Weight decay of all variables, by a mask or by hand."""
    variables = state.merge(loop.params, loop.state)
    tx = optax.adamw(1e-3, mask=jax.tree.map(lambda leaf: leaf.ndim > 1, variables))
    with pytest.raises(ValueError, match=r"mask, labels or state of the optimizer were made from all .*state\.split"):
        state.TrainState.create(apply_fn=None, params=variables, tx=tx)
    if isinstance(loop, OfNnx):
        tx = optax.adamw(1e-3, mask=jax.tree.map(lambda leaf: leaf.ndim > 1, nnx.state(loop.model)))
        with pytest.raises(ValueError, match="quant_kernel"):
            nnx.Optimizer(loop.model, tx, wrt=nnx.Param)

    def decayed(params: Any, quant_state: Any) -> Any:
        grads, observation = gradients(loop, params, quant_state, X)
        params = optax.apply_updates(params, grads)
        return jax.tree.map(lambda leaf: 0.9 * leaf, (params, state.update(quant_state, observation)))

    with pytest.raises(ValueError, match=AS_WEIGHT):
        jaxquant.coverage(decayed, loop.params, loop.state).check()


def check_clipped(loop: Linen) -> None:
    """Clipping in the optimizer applies only to parameters; a norm of all gradients is an error in ``check``."""
    variables = state.merge(loop.params, loop.state)
    grads, observation = gradients(loop, loop.params, loop.state, X)
    optimizer = state.Optimizer(optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0)))
    stepped, _ = optimizer.step(state.merge(grads, observation), optimizer.init(variables), variables)
    moved = jax.tree.map(jnp.subtract, stepped["params"], loop.params)
    np.testing.assert_allclose(optax.global_norm(moved), 1e-3, rtol=2.0**-10)
    expected = state.update(loop.state, observation)
    jax.tree.map(np.testing.assert_array_equal, stepped[state.OVERWRITE_WITH_GRADIENT], expected)

    def clipped(params: Any, quant_state: Any, norm: Any) -> Any:
        grads, observation = both = gradients(loop, params, quant_state, X)
        factor = 1 / norm((grads, observation))
        return jax.tree.map(lambda leaf: factor * leaf, both)

    jaxquant.coverage(lambda *args: clipped(*args, lambda both: optax.global_norm(both[0])), *vars_of(loop)).check()
    with pytest.raises(ValueError, match=NORM):
        jaxquant.coverage(lambda *args: clipped(*args, optax.global_norm), *vars_of(loop)).check()

    def rooted(params: Any, quant_state: Any) -> Any:
        grads, observation = jax.tree.map(jnp.cbrt, gradients(loop, params, quant_state, X))
        return optax.apply_updates(params, grads), state.update(quant_state, observation)

    with pytest.raises(ValueError, match=NORM):
        jaxquant.coverage(rooted, *vars_of(loop)).check()


def check_overwritten(loop: Linen) -> None:
    """Overwriting is correct with one use; with several uses, micro-batches or devices, ``check`` raises an error."""

    def twice(params: Any, quant_state: Any) -> Any:
        return jax.grad(lambda *both: loop(*both, X) + loop(*both, LARGE), (0, 1))(params, quant_state)

    def averaged(params: Any, quant_state: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, gradients(loop, params, quant_state, x)), None

        both = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, (params, quant_state)), jnp.stack([X, LARGE]))[0]
        return jax.tree.map(lambda leaf: leaf / 2, both)

    def step(observe: Any, advance: Any = lambda quant_state, observation: observation) -> Any:
        def stepped(params: Any, quant_state: Any) -> Any:
            grads, observation = observe(params, quant_state)
            return optax.apply_updates(params, grads), advance(quant_state, observation)

        return stepped

    def once(params: Any, quant_state: Any) -> Any:
        return gradients(loop, params, quant_state, X)

    found, expected = (step(once, *how)(*vars_of(loop))[1] for how in ((), (state.update,)))
    histories = [op_state(each)["input_amax_history"] for each in (found, expected)]
    np.testing.assert_array_equal(*histories)
    jaxquant.coverage(step(once), *vars_of(loop)).check()
    for several in (twice, averaged, lambda *both: jax.tree.map(lambda leaf: leaf / 8.0, once(*both))):
        with pytest.raises(
            ValueError, match=r"quant state '[\w/]*' is overwritten with the sum .*jaxquant.state.update"
        ):
            jaxquant.coverage(step(several), *vars_of(loop)).check()
        jaxquant.coverage(step(several, state.update), *vars_of(loop)).check()
        jaxquant.coverage(several, *vars_of(loop)).check()
        counted = lambda count, *both, of=several: (of(*both), count + 1)  # noqa: E731
        jaxquant.coverage(counted, jnp.int32(0), *vars_of(loop)).check()
    optimizer, variables = state.Optimizer(optax.MultiSteps(optax.adam(0.1), 2)), state.merge(*vars_of(loop))

    def in_parts(opt_state: Any, variables: Any) -> Any:
        return optimizer.step(state.merge(*twice(*state.split(variables))), opt_state, variables)

    jaxquant.coverage(in_parts, optimizer.init(variables), variables).check()


def test_28_a_mean_over_examples_and_a_constrained_gradient_are_seen():
    loop, mesh = Function(), jax.make_mesh((1,), ("x",))

    def step(params: Any, quant_state: Any) -> Any:
        mean = lambda *both: jax.vmap(lambda x: loop(*both, x))(jnp.stack([X, LARGE])).mean()  # noqa: E731
        grads, observation = jax.grad(mean, (0, 1))(params, quant_state)
        where = jax.NamedSharding(mesh, jax.P())
        grads, observation = jax.lax.with_sharding_constraint((grads, observation), where)
        return jax.lax.with_sharding_constraint(optax.apply_updates(params, grads), where), observation

    with pytest.raises(ValueError, match="is overwritten with the sum"):
        jaxquant.coverage(step, *vars_of(loop)).check()


def check_partly_restored(loop: Linen) -> None:
    """Float parameters with a new state can be trained; a state with a missing tensor is an error."""
    assert loop(loop.params, warmed(loop), X) > 0

    def without_input(own: Any) -> Any:
        return make_state({name: row for name, row in state.rows_of(own).items() if not name.endswith("input")})

    with pytest.raises(ValueError, match=r"'input(_\w+)?'"):
        loop(loop.params, jax.tree.map(without_input, loop.state, is_leaf=is_tables), X)
    jax.tree.map(np.testing.assert_array_equal, state.from_flax(nested(loop.state), loop.state), loop.state)
    optimizer, floats = state.Optimizer(optax.sgd(0.1)), {"params": loop.params}
    with pytest.raises(ValueError, match=r"add the quant state that model.init returned, with jaxquant.state.merge"):
        optimizer.step(state.merge(loop.params, loop.state), optimizer.init(floats), floats)
    with pytest.raises(ValueError, match=r"no collection 'params', .*, not only variables\['params'\]"):
        state.TrainState.create(apply_fn=None, params=loop.params, tx=optax.sgd(0.1))


def vars_of(loop: Linen) -> tuple[Any, Any]:
    return loop.params, loop.state


def warmed(loop: Linen) -> Any:
    """Return quant state after four steps: its history has no zeros, and a small update makes no entry negative."""
    quant_state, observe = loop.state, jax.jit(lambda own: gradients(loop, loop.params, own, LARGE)[1])
    for _ in range(LENGTH):
        quant_state = state.update(quant_state, observe(quant_state))
    assert (op_state(quant_state)["input_amax_history"] == recorded(jnp.abs(LARGE).max())).all()
    return quant_state


MISTAKES = {
    "forgotten": check_forgotten,
    "optimized": check_optimized,
    "decayed": check_decayed,
    "clipped": check_clipped,
    "overwritten": check_overwritten,
    "partly restored": check_partly_restored,
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("loop", LOOPS)
def test_28_a_mistake_with_quant_state_is_an_error_or_does_no_harm(loop, mistake):
    MISTAKES[mistake](made(loop))


SPARSE = {"quantization": "fp8_full", "weight_sparsity_n": 2, "weight_sparsity_m": 4, "quant_backend": "native"}


@pytest.mark.parametrize("config", [{"quantization": "fp8", "amax_init": "flax"}, SPARSE])
def test_28_state_of_flax_mode_and_sparsity_in_an_optimizer_is_noticed(config):
    model: Any = jaxquant.maybe_quantize_model(nn.Dense(8), config, X)
    variables = model.init(jax.random.key(1), X)
    grads = jax.grad(lambda variables: (model.apply(variables, X) ** 2).mean())(variables)
    variables = jax.tree.map(lambda leaf, grad: leaf - 1e-3 * grad, variables, grads)
    assert np.isnan(jax.jit(model.apply)(variables, X)).all()
    with pytest.raises(ValueError, match="has negative numbers, because an optimizer updated quant state; get new"):
        model.apply(variables, X)


def _without_marks(history, old, amax, bins, *static, original=jaxquant.core.delayed._scale):
    return original(history, old, amax, None, *static)


BROKEN = {
    "nobody watches": (state.watch, "_watched", lambda watch, path, answer, operands, state: state, check_forgotten),
    "nobody looks at the marks": (jaxquant.core.delayed, "_scale", _without_marks, check_optimized),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_property_is_seen(name):
    *broken, check = BROKEN[name]
    fails_when_broken(*broken, lambda: check(Linen()))
