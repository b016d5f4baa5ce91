"""``implementation="pallas"`` in the ops, without a TPU: XLA's numbers, and a reason if XLA runs instead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxquant
from jaxquant.config.recipes import RECIPES
from jaxquant.core import delayed
from jaxquant.ops import dot_general, implementation, initial_state
from jaxquant.ops.implementation import choices_made
from tests.ops.test_block_scaled import on

NUMBERS = (((1,), (0,)), ((), ()))


def recipe(name):
    found = RECIPES[name].recipe
    assert found is not None
    return found


def warm(state, amax):
    """Return a warm state: its histories contain an amax, and its shapes mark it as warm."""

    def one(tensor):
        bins = delayed.widen_bins(delayed.empty_bins())
        return tensor | {"amax_history": tensor["amax_history"].at[0].set(amax), "amax_bins": bins}

    return {name: one(tensor) for name, tensor in state.items()}


def inputs(dtype="bfloat16"):
    """Return small integers, which every format of this file represents exactly with the scales of the states."""
    generator = np.random.default_rng(0)
    x, w, g = (jnp.asarray(generator.integers(-3, 4, shape), dtype) for shape in ((32, 256), (256, 64), (32, 64)))
    return x, w, g


def gradients(spec, implementation, x, w, g, state):
    def loss(x, w, state):
        out = dot_general(x, w, NUMBERS, recipe=spec, state=state, key=jax.random.key(0), implementation=implementation)
        return jnp.sum((out * g).astype(jnp.float32)), out

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, w, state)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def in_form(form, run):
    """Return a step in one of the forms that programs use: plain, under vmap, or under shard_map."""
    if form == "vmap":
        mapped = jax.vmap(run, (0, 0, 0, None))
        return lambda x, w, g, state: mapped(jnp.stack([x, -x]), jnp.stack([w, w * 2]), jnp.stack([g, g]), state)
    mesh, cut, whole = Mesh(np.array(jax.devices()[:1]), ("batch",)), PartitionSpec("batch"), PartitionSpec()
    specs = {"in_specs": (cut, whole, cut, whole), "out_specs": ((cut, whole, whole), cut)}
    return jax.shard_map(run, mesh=mesh, **specs) if form else run


@pytest.mark.parametrize(("name", "form"), [("fp8", ""), ("int8_delayed", ""), ("fp8", "vmap"), ("fp8", "shard_map")])
def test_a_step_has_the_bits_of_xlas(name, form, monkeypatch):
    jax.clear_caches()  # a cached trace would not record the choice
    monkeypatch.setattr(implementation, "_choices", {})
    spec, (x, w, g) = recipe(name), inputs()
    state = warm(initial_state(spec), 448.0 if name == "fp8" else 127.5)
    run = {each: jax.jit(in_form(form, functools.partial(gradients, spec, each))) for each in ("pallas", "xla")}
    got, wanted = (each(x, w, g, state) for each in run.values())
    equal(got, wanted)
    assert all(np.asarray(each, np.float32).any() for each in jax.tree.leaves(got[0][:2]))
    ran = {piece for piece, choice in choices_made() if choice.name == "pallas"}
    assert ran == {"dot_general", "quantize"}, choices_made()


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("fp8_full", {}, "XLA computes the amax of a dynamic scale together"),
        ("int4", {}, "multiplies two int8 or two fp8 arrays, not int4 and int4"),
        ("fp8", {"cold": True}, "without an amax history, XLA computes"),
    ],
)
def test_what_a_kernel_does_not_do_is_named_and_xlas(name, sizes, why):
    spec = recipe(name)
    x, w, g = inputs(sizes.get("dtype", "float32"))
    state = initial_state(spec)
    state = state if sizes.get("cold") or not state else warm(state, 448.0)
    got, wanted = (jax.jit(functools.partial(gradients, spec, each))(x, w, g, state) for each in ("pallas", "xla"))
    equal(got, wanted)
    reasons = [choice.reason for _, choice in choices_made() if choice.name == "xla"]
    assert any(why in reason and reason.startswith("pallas was requested; ") for reason in reasons), reasons


def test_coverage_on_a_gpu_reads_its_kernels_as_their_references():
    def step(x, w, g):
        run = functools.partial(dot_general, dimension_numbers=NUMBERS, recipe=recipe("int8"), implementation="pallas")
        y, pull = jax.vjp(run, x, w)
        return y, pull(g)

    shapes = [on("NVIDIA H200", 256, 256) for _ in range(3)]
    assert "mpmd_map" in str(jax.make_jaxpr(step)(*shapes))
    found = jaxquant.coverage(step, *shapes)
    assert [row.matmul for row in found.rows] == ["fwd", "dlhs", "drhs"]
    assert found.share() == 1
